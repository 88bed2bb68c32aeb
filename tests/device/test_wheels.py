"""isotrain and the packages under it ask of torch_npu only what its published wheels have."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import npusim
import pytest
import torch
import torch_npu
import yaml
from contract import plans, schemas, wheels
from contract.calls import Use, our_uses, their_uses
from contract.operators import FUSED, NEWEST, shapes
from contract.sources import Package, signature

from preference_runs import write_preferences

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
SIMULATED = ("npu_fusion_attention", "npu_grouped_matmul", "npu_rms_norm", "npu_rotary_mul", "npu_swiglu")
# The versions that isotrain's torch fits; in older ones a grouped product has no gradient of its weights.
GROUPED = ("2.10.0", "2.13.0")
# Asked for with a default: wheels below 2.7 do not have it.
OPTIONAL = {"torch_npu.npu.ipc_collect"}
# The version that fits the torch that is installed, and can therefore be imported.
LIVE = "2.13.0"
# Jobs that are also looked at on two ranks, each in processes of its own.
SHARDED = ("sft", "sft, lora", "dpo")
# HCCL's own. It also takes AVG, which it makes of a sum in the tensor's own type.
REDUCTIONS = {"SUM", "PRODUCT", "MIN", "MAX"}


@dataclass(frozen=True)
class Wheel:
    version: str
    package: Package
    schemas: dict[str, str]

    def signature(self, symbol: str) -> inspect.Signature | None:
        """How a symbol is called, None where that cannot be known; an absent one is a KeyError.

        Operators are put under `torch_npu` when it is imported: what the library registers is what there is.
        """
        found = self.package.find(symbol)
        if found is not None:
            return found.signature
        parent, _, name = symbol.rpartition(".")
        if parent != "torch_npu":
            raise KeyError(symbol)
        return schemas.signature(self.schemas[name])

    def kernels(self) -> set[str]:
        """The aten operators that the wheel says it has kernels for."""
        names: set[str] = set()
        for file in sorted((self.package.root / "csrc" / "aten").glob("npu_native_functions*.yaml")):
            for entries in yaml.safe_load(file.read_text()).values():
                entries = entries if isinstance(entries, list) else []
                texts = [entry if isinstance(entry, str) else entry.get("func", "") for entry in entries]
                names.update("aten::" + text.partition("(")[0] for text in texts)
        return names


def open_wheel(version: str) -> Wheel:
    try:
        directory = wheels.unzipped(version)
    except wheels.Unavailable as missing:
        pytest.skip(str(missing))
    package = Package(directory / "torch_npu")
    return Wheel(version, package, schemas.schemas_in(package.root / "lib" / "libtorch_npu.so"))


@pytest.fixture(scope="module", params=wheels.VERSIONS)
def wheel(request: pytest.FixtureRequest) -> Wheel:
    return open_wheel(str(request.param))


def complaints(wheel: Wheel, uses: Iterable[Use]) -> list[str]:
    found = []
    for use in sorted(uses):
        try:
            signature = wheel.signature(use.symbol)
            if use.called:
                assert signature is not None, "it cannot be told how it is called"
                signature.bind(*[None] * use.positional, **dict.fromkeys(use.keywords))
        except (AssertionError, KeyError, TypeError) as error:
            found.append(f"{use.where}: {use.symbol} in {wheel.version}: {error!r}")
    return found


def test_everything_that_is_called_is_there(wheel: Wheel) -> None:
    ours, theirs = {use for use in our_uses() if use.symbol not in OPTIONAL}, their_uses()
    assert len(ours) > 10 and {use.symbol for use in theirs} >= {"torch_npu.npu_fusion_attention"}
    assert not complaints(wheel, ours | theirs)
    symbols = {use.symbol for use in ours | theirs}
    print(f"torch_npu {wheel.version}: {len(symbols)} symbols in {len(ours | theirs)} ways of use")


def test_a_wrong_use_is_noticed(wheel: Wheel) -> None:
    wrong = [
        Use("torch_npu.npu.set_compile_modes"),
        Use("torch_npu.npu.set_compile_mode", called=True, keywords=("jit",)),
        Use("torch_npu.npu.synchronize", called=True, positional=2),
        Use("torch_npu.npu.set_rng_state", called=True),
        Use("torch_npu.npu_rms_norms"),
        Use("torch_npu.npu_rms_norm", called=True, positional=2, keywords=("eps",)),
    ]
    assert len(complaints(wheel, wrong)) == len(wrong)


def arguments(signature: inspect.Signature) -> list[tuple[str, object]]:
    return [(p.name, p.default) for p in signature.parameters.values()]


def test_fused_operators(wheel: Wheel) -> None:
    for name, expected in FUSED.items():
        found = arguments(schemas.signature(wheel.schemas[name]))
        assert tuple(argument for argument, _ in found[: len(expected)]) == expected, name
        added = found[len(expected) :]
        assert all(default is not inspect.Parameter.empty for _, default in added), (name, added)
        print(f"torch_npu {wheel.version}: {name} adds {[argument for argument, _ in added]}")
    assert all((name in wheel.schemas) == (wheel.version == LIVE) for name in NEWEST)


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_operators_are_called_like_the_real_ones(wheel: Wheel, name: str) -> None:
    if name == "npu_grouped_matmul" and wheel.version not in GROUPED:
        pytest.skip("isotrain needs torch 2.10")
    simulated = arguments(schemas.signature(name + torch_npu.operators.SCHEMAS[name]))
    assert arguments(schemas.signature(wheel.schemas[name]))[: len(simulated)] == simulated


def test_groups_of_a_grouped_product(wheel: Wheel) -> None:
    """The gradient of weights is a product in groups of what is summed over, `group_type` 2."""
    file = wheel.package.root / "op_plugin" / "meta" / "_meta_registrations.py"
    source = file.read_text(encoding="utf-8")
    assert ("group_type only supports -1, 0 and 2" in source) == (wheel.version in GROUPED)


def run_real(work: Path) -> dict[str, Any]:
    """Answers of the real package, in a process that has it in place of the simulated one."""
    directory = open_wheel(LIVE).package.root.parent
    if not torch.__version__.startswith(LIVE) or not wheels.fits_this_python(directory):
        pytest.skip(f"torch_npu {LIVE} can be imported only with torch {LIVE} and its own Python")
    try:
        libraries = wheels.stubs(directory)
    except wheels.Unavailable as missing:
        pytest.skip(str(missing))
    uses, output = work / "uses.json", work / "answers.json"
    uses.write_text(json.dumps([asdict(use) for use in our_uses() | their_uses()]))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(directory), str(HERE)]),
        "LD_LIBRARY_PATH": os.pathsep.join([str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]),
    }
    command = [sys.executable, "-m", "contract.real", str(uses), str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(output.read_text()))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_real(tmp_path_factory.mktemp("real"))


def test_the_real_package_answers_every_call(real: dict[str, Any]) -> None:
    assert real["version"].startswith(LIVE) and not real["broken"]
    print(
        f"torch_npu {real['version']}: {len(our_uses() | their_uses())} ways of use bind to live signatures"
    )


def test_schemas_in_the_library_are_those_that_are_registered(real: dict[str, Any]) -> None:
    written = open_wheel(LIVE).schemas
    assert real["schemas"].keys() == {*FUSED, *NEWEST}
    for name, schema in real["schemas"].items():
        assert arguments(schemas.signature(schema)) == arguments(schemas.signature(written[name])), name
        assert schemas.returns(schema) == schemas.returns(written[name]), name


def test_the_simulated_operators_return_the_same_shapes(real: dict[str, Any]) -> None:
    assert real["shapes"] == shapes(torch_npu, "npu")
    assert real["shapes"]["attention TND"][1] == [[24, 4, 8], "torch.float32"]
    assert real["shapes"]["rms norm"][1] == [[2, 16, 1], "torch.float32"]


def test_collectives(real: dict[str, Any], wheel: Wheel) -> None:
    """Without a device no communicator can be made: what HCCL refuses is read from the library."""
    assert "hccl" in real["backends"] and real["backend_of_device"] == "hccl"
    assert real["devices_of_backend"] == ["npu"]
    library = (wheel.package.root / "lib" / "libtorch_npu.so").read_bytes()
    assert b"Cannot use ReduceOp." in library
    for refused in ("BAND", "BOR", "BXOR"):
        assert f"\0{refused}\0".encode() in library


@dataclass(frozen=True)
class Traced:
    """What all runs together executed on the device."""

    calls: Counter[str]
    double: Counter[str]
    reductions: Counter[str]


@pytest.fixture(scope="module")
def traced(real: dict[str, Any], tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    work = tmp_path_factory.mktemp("traced")
    registry = work / "registry.json"
    registry.write_text(json.dumps(real["resolution"]))
    rooms = [HERE.parents[1] / "src", HERE.parent, HERE, HERE.parent / "trainers" / "online"]
    given = [str(tiny), str(write_preferences(work, 100))]
    traced = Traced(Counter(), Counter(), Counter())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, rooms)))
        for only in ("", *SHARDED):
            output = work / (only or "one rank")
            output.mkdir()
            command = [sys.executable, "-m", "contract.trace", *given, str(output), str(registry)]
            npusim.run_ranks([*command, only], ranks=2 if only else 1, timeout=900)
            for file in sorted(output.glob("rank-*.json")):
                _add(traced, file)
    return traced


def _add(traced: Traced, file: Path) -> None:
    for name, trace in json.loads(file.read_text()).items():
        print(f"{file.parent.name}, {file.stem}: {name}: {len(trace['calls'])} operators")
        for field, counts in trace.items():
            getattr(traced, field).update(counts)


def test_operators_of_our_runs(real: dict[str, Any], traced: Traced) -> None:
    """`kernel` in torch's own dispatch table is the device's; a composition has been traced to its parts.

    What then only the fallback would answer is run on the host, with a copy there and back.
    """
    resolved = {name: real["resolution"].get(name, "nothing") for name in traced.calls}
    for piece, whole in plans.PIECES.items():
        assert piece in traced.calls, f"{piece} is not seen any more"
        assert real["resolution"][whole] == "kernel" and whole in real["autograd"]
    on_host = {name for name, how in resolved.items() if how in ("backend fallback", "nothing")}
    on_host -= set(plans.PIECES)
    print(f"{len(resolved)} operators traced: {dict(Counter(resolved.values()))}")
    print(f"{len(on_host)} without a kernel of torch_npu {LIVE}: {sorted(on_host)}")
    assert on_host == set(plans.ON_HOST)
    composed = {name for name, how in resolved.items() if how in ("default backend kernel", "math kernel")}
    assert {n for n in composed if n.startswith(("aten::_foreach", "aten::_fused"))} == set(plans.LOOPS)
    # An optimizer whose learning rate is a tensor would leave the device here.
    assert "aten::_fused_adamw_" in traced.calls and real["resolution"]["aten::_fused_adamw_"] == "kernel"


def test_operators_of_our_runs_in_every_version(wheel: Wheel, real: dict[str, Any], traced: Traced) -> None:
    """What a wheel lists is what it registers, as the newest shows; for the rest torch has compositions."""
    kernels = wheel.kernels()
    if wheel.version == LIVE:
        live = {name for name, how in real["resolution"].items() if how == "kernel"}
        assert {name for name in live if name.startswith("aten::")} <= kernels
    on_host = {
        name
        for name in traced.calls
        if name.startswith("aten::") and plans.PIECES.get(name, name) not in kernels
        if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in plans.COMPOSITE)
    }
    print(f"torch_npu {wheel.version}: {len(on_host)} of {len(traced.calls)} on the host: {sorted(on_host)}")
    assert on_host == set(plans.ON_HOST)


def test_double_precision_on_the_device(traced: Traced) -> None:
    print(f"in double precision: {dict(traced.double)}")
    assert set(traced.double) == set(plans.IN_DOUBLE)


def test_reductions_of_our_runs(traced: Traced) -> None:
    print(f"reductions over ranks: {dict(traced.reductions)}")
    assert traced.reductions and set(traced.reductions) <= REDUCTIONS


def test_device_memory_is_shared_as_torch_shares_it(wheel: Wheel) -> None:
    """`device.exchange` knows the arguments by their places, and the simulation has the same ones."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor
    from torch_npu.multiprocessing.reductions import rebuild_npu_tensor

    expected = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert list(inspect.signature(rebuild_npu_tensor).parameters) == expected
    assert (expected[6], expected[7], expected[10]) == ("storage_device", "storage_handle", "requires_grad")
    file = wheel.package.root / "multiprocessing" / "reductions.py"
    if wheel.version in ("2.5.1", "2.6.0"):
        assert not file.exists(), "then weights need not go through host memory there"
        return
    defined = {
        node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
    }
    assert list(signature(defined["rebuild_npu_tensor"].args).parameters) == expected
    assert "torch.multiprocessing.reductions.reduce_tensor = " in file.read_text(), "found when it is called"


def test_a_communicator_of_hccl_is_aborted_with_a_reason(wheel: Wheel) -> None:
    """`device.exchange.abort` calls it as torch_npu's own Python does."""
    if wheel.version not in GROUPED:
        pytest.skip("isotrain needs torch 2.10")
    tree = ast.parse((wheel.package.root / "distributed" / "distributed_c10d.py").read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "abort_hccl_comm"
    ]
    assert calls and all(len(call.args) == 1 and not call.keywords for call in calls)
    assert b"abort_hccl_comm\0" in (wheel.package.root / "lib" / "libtorch_npu.so").read_bytes()


def test_hccl_is_a_registered_backend(wheel: Wheel) -> None:
    """With torch's extended arguments: so a group can be made of a store, beside that of the ranks."""
    places = [wheel.package.root / name for name in ("__init__.py", "_init/registry/distributed.py")]
    sources = "".join(place.read_text() for place in places if place.exists()).replace("'", '"')
    (call,) = [part for part in sources.split("register_backend(")[1:] if part.lstrip().startswith('"hccl"')]
    assert "extended_api=True" in call
