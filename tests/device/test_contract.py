"""The tools that read what sources use and what packages define, on small examples."""

from __future__ import annotations

import inspect
from functools import reduce
from pathlib import Path

import pytest
import torch_npu
from contract import schemas
from contract.calls import OURS, Use, our_uses, their_uses, uses
from contract.sources import Package

NPU = "torch_npu.npu"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.npu.synchronize()", [Use(f"{NPU}.synchronize", True)]),
        (
            "torch.npu.set_compile_mode(jit_compile=False)",
            [Use(f"{NPU}.set_compile_mode", True, 0, ("jit_compile",))],
        ),
        ("self.module.get_rng_state().cpu()", [Use(f"{NPU}.get_rng_state", True)]),
        ("f(self.module.a(1, 2), self.module.b)", [Use(f"{NPU}.a", True, 2), Use(f"{NPU}.b")]),
        ("torch.npu.matmul.allow_hf32", [Use(f"{NPU}.matmul.allow_hf32")]),
        ("torch.get_device_module(x.device).empty_cache()", [Use(f"{NPU}.empty_cache", True)]),
        ("getattr(torch, self.type).seed(3)", [Use(f"{NPU}.seed", True, 1)]),
        ("getattr(torch.npu, '_initialized', False)", [Use(f"{NPU}._initialized")]),
        ("torch.npu.device(*arguments)", [Use(f"{NPU}.device")]),
        ("torch.npu.device(**arguments)", [Use(f"{NPU}.device")]),
        (
            "from torch_npu import npu_swiglu as fused\nfused(x, dim=-1)",
            [Use("torch_npu.npu_swiglu"), Use("torch_npu.npu_swiglu", True, 1, ("dim",))],
        ),
        ("torch.cuda.synchronize()\nmodule.x()\nself.modules.y()\ngetattr(torch, dtype).itemsize", []),
    ],
)
def test_what_a_source_uses(source: str, expected: list[Use]) -> None:
    assert sorted(set(uses(source, "here", OURS))) == expected


def test_where_it_is_used() -> None:
    (use,) = uses("import torch\n\ntorch.npu.synchronize()", "here.py", OURS)
    assert use.where == "here.py:3"


def test_the_simulated_device_has_all_that_is_used() -> None:
    ours = our_uses()
    expected = {f"{NPU}.set_device", f"{NPU}.set_compile_mode", "torch_npu.npu_grouped_matmul"}
    assert {*expected, f"{NPU}.empty_cache"} <= {use.symbol for use in ours}
    for use in sorted(ours | their_uses()):
        if use.symbol == f"{NPU}.amp.GradScaler":  # accelerate's trainer is not ours
            continue
        thing = reduce(getattr, use.symbol.split(".")[1:], torch_npu)
        if use.called:
            # An operator's own signature is `*args, **kwargs`; its schema is that of the wheels.
            name = use.symbol.rpartition(".")[2]
            schema = torch_npu.operators.SCHEMAS.get(name)
            signature = schemas.signature(name + schema) if schema else inspect.signature(thing)
            signature.bind(*[None] * use.positional, **dict.fromkeys(use.keywords))


FILES = {
    "__init__.py": "from .tools import helper as helped\nimport box.device",
    "tools.py": "def helper(a, b=1, *, c=None): ...",
    "device/__init__.py": """
from .memory import *
from .streams import Stream
from os import path
if True:
    def ready(): ...
try:
    limit = 3
except ImportError:
    limit = 4
""",
    "device/memory.py": "__all__ = ['used']\ndef used(device=None): ...\ndef hidden(): ...",
    "device/streams.py": """class Stream(Base):
    def __new__(cls, device=None, **more): ...
    def wait(self, event): ...
""",
}


@pytest.fixture
def box(tmp_path: Path) -> Package:
    for name, text in FILES.items():
        file = tmp_path / "box" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Package(tmp_path / "box")


@pytest.mark.parametrize(
    ("symbol", "where", "signature"),
    [
        ("box.helped", "box/tools.py:1", "(a, b='1', *, c='None')"),
        ("box.device.used", "box/device/memory.py:2", "(device='None')"),
        ("box.device.memory.hidden", "box/device/memory.py:3", "()"),
        ("box.device.Stream", "box/device/streams.py:1", "(device='None', **more)"),
        ("box.device.Stream.wait", "box/device/streams.py:1", "(event)"),
        ("box.device.ready", "box/device/__init__.py:6", "()"),
        ("box.device.limit", "box/device/__init__.py:10", "None"),
        ("box.device.path", "os.path", "None"),
        ("box.device", "box/device/__init__.py", "None"),
    ],
)
def test_what_a_package_defines(box: Package, symbol: str, where: str, signature: str) -> None:
    found = box.find(symbol)
    assert found is not None and (found.where, str(found.signature)) == (where, signature)


@pytest.mark.parametrize(
    "symbol", ["box.helper", "box.device.hidden", "box.device.Stream.go", "box.nothing.x"]
)
def test_what_a_package_does_not_define(box: Package, symbol: str) -> None:
    assert box.find(symbol) is None


def test_schemas_in_a_library(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    wanted = 'npu_a(Tensor input, int[]? n=None, *, float eps=1e-06, str mode="x") -> (Tensor, Tensor)'
    library.write_bytes(
        b"\x7fELF\x01\0" + wanted.encode() + b"\0npu_a: no schema(x)\0my_npu_b(Tensor x) -> Tensor\0"
        b"npu_c.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)\0npu_d(Tensor x) ->\0"
    )
    found = schemas.schemas_in(library)
    assert list(found) == ["npu_a", "npu_c.out"] and found["npu_a"] == wanted
    signature = schemas.signature(wanted)
    assert str(signature) == "(input, n=None, *, eps=1e-06, mode='x')"
    assert schemas.returns(wanted) == ["Tensor", "Tensor"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'"):
        signature.bind(None, epsilon=1)
