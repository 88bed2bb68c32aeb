"""Which attributes of a module some sources reach, and with which arguments they call them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "isotrain"

# Expressions that are the device module where they stand, each in the sources where it means that.
EVERYWHERE = {"torch.npu": "torch_npu.npu", "torch_npu": "torch_npu"}
OURS = EVERYWHERE | {
    "self.module": "torch_npu.npu",
    "torch.get_device_module()": "torch_npu.npu",
    "getattr(torch, .type)": "torch_npu.npu",
}
HANDLES = EVERYWHERE | dict.fromkeys(
    ("device_handle", "self.device_handle", "self._device_handle", "device_module"), "torch_npu.npu"
)
# What others ask of the device on our path: their sources, and the names they have for it.
THEIRS: dict[str, Mapping[str, str]] = {
    "transformers.integrations.npu_flash_attention": EVERYWHERE,
    "transformers.utils.import_utils": EVERYWHERE,
    "accelerate.utils.imports": EVERYWHERE,
    "accelerate.utils.memory": EVERYWHERE,
    "accelerate.utils.modeling": EVERYWHERE,
    "torch.utils.checkpoint": HANDLES,
    "torch.distributed.device_mesh": HANDLES,
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": HANDLES,
    "torch.distributed.fsdp._fully_shard._fsdp_init": HANDLES,
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": HANDLES,
    "torch.distributed.fsdp._fully_shard._fsdp_state": HANDLES,
}


@dataclass(frozen=True, order=True)
class Use:
    """One way in which a symbol is used; `where` is only for people."""

    symbol: str
    called: bool = False
    positional: int = 0
    keywords: tuple[str, ...] = ()
    where: str = field(default="", compare=False)


def our_uses() -> set[Use]:
    """Of all of isotrain. `self.module` is `Accelerator.module`, which is `torch.<type>`."""
    found: set[Use] = set()
    for path in sorted(SOURCE.rglob("*.py")):
        roots = OURS if path.parent.name == "device" else {**OURS, "self.module": ""}
        found.update(uses(path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix(), roots))
    return found


def their_uses() -> set[Use]:
    """Of the files of other packages that reach the device while isotrain trains."""
    found: set[Use] = set()
    for module, roots in THEIRS.items():
        spec = find_spec(module)
        assert spec is not None and spec.origin is not None, module
        found.update(uses(Path(spec.origin).read_text(encoding="utf-8"), module, roots))
    return found


def uses(source: str, where: str, roots: Mapping[str, str]) -> Iterator[Use]:
    """Everything below `roots` (expression -> dotted name of the module) that a source reads or calls."""
    tree = ast.parse(source)
    known = {name: target for name, target in roots.items() if target}
    for symbol, alias, line in _imported(tree, set(known.values())):
        known[alias] = symbol
        yield Use(symbol, where=f"{where}:{line}")
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        # Of `a.b.c` only the whole chain. One that goes on behind a call, as in `a.b().c`, ends at the call.
        if not isinstance(node, ast.Attribute | ast.Name) or id(node) in inner:
            continue
        symbol = _symbol(node, known)
        if symbol is None or symbol in roots.values() or isinstance(node.ctx, ast.Store):
            continue
        yield _use(symbol, calls.get(id(node)), f"{where}:{node.lineno}")
    for node in calls.values():
        if ast.unparse(node.func) == "getattr" and (above := _symbol(node.args[0], known)):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Use(f"{above}.{name.value}", where=f"{where}:{node.lineno}")


def _use(symbol: str, call: ast.Call | None, where: str) -> Use:
    if call is None:
        return Use(symbol, where=where)
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    if starred or any(keyword.arg is None for keyword in call.keywords):
        return Use(symbol, where=where)  # what is passed is not written here
    keywords = tuple(sorted(keyword.arg for keyword in call.keywords if keyword.arg))
    return Use(symbol, True, len(call.args), keywords, where)


def _imported(tree: ast.Module, modules: set[str]) -> Iterator[tuple[str, str, int]]:
    """Names that are imported from one of the modules: the symbol, its local name, the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            if node.module not in modules and node.module.split(".")[0] not in modules:
                continue
            for alias in node.names:
                yield f"{node.module}.{alias.name}", alias.asname or alias.name, node.lineno


def _symbol(node: ast.expr, known: Mapping[str, str]) -> str | None:
    """The dotted name that an expression reaches, if it starts at a known one."""
    text = _text(node)
    if text in known:
        return known[text]
    if isinstance(node, ast.Attribute):
        above = _symbol(node.value, known)
        return None if above is None else f"{above}.{node.attr}"
    return None


def _text(node: ast.expr) -> str:
    """The expression as written, without the arguments of a call that only chooses the device."""
    text = ast.unparse(node)
    if re.fullmatch(r"getattr\(torch, [\w.]*\.type\)", text):
        return "getattr(torch, .type)"
    return re.sub(r"^(torch\.get_device_module)\(.*\)$", r"\1()", text)
