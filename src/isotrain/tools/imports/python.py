"""Names and values of a Python script, which is parsed with `ast` and never run.

A name stands for what is assigned to it, if that is one text, number, list or call of the script. Everything
else, such as a value that a condition decides, is unknown and says why.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from isotrain.tools.imports.hydra import shown
from isotrain.tools.imports.source import ImportSourceError, Unknown

_LONGEST = 512 * 1024
MOST_DEPTH = 40
_MOST_STEPS = 20_000
_LARGEST_NUMBER = 1e18
_LONGEST_TEXT = 10_000
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class _Binding:
    """What a name is bound to; no value if only running tells."""

    line: int
    end: int
    value: ast.expr | None
    what: str
    conditional: bool


@dataclass
class _Scope:
    parent: _Scope | None = None
    bindings: dict[str, list[_Binding]] = field(default_factory=dict)


@dataclass(frozen=True)
class Effect:
    """A statement that may change an object: an attribute that is set, or a call without a result."""

    node: ast.expr
    value: ast.expr | None
    conditional: bool


class PythonScript:
    """Names, calls and effects of a script, in all of its functions but not in its classes."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise ImportSourceError(f"longer than {_LONGEST // 1024} KiB; give the part with the training")
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise ImportSourceError(f"line {error.lineno}: this is no Python: {error.msg}") from None
        except (RecursionError, MemoryError, ValueError):
            raise ImportSourceError("the script is too deeply nested to be read") from None
        self.scope_of: dict[int, _Scope] = {}
        self.calls: list[ast.Call] = []
        self.effects: list[Effect] = []
        self.steps = 0
        self.subclasses: dict[str, tuple[str, int]] = {}
        self._read(tree.body)

    def _read(self, body: list[ast.stmt]) -> None:
        waiting: list[tuple[list[ast.stmt], _Scope, bool]] = [(body, _Scope(), False)]
        while waiting:
            statements, scope, conditional = waiting.pop()
            for statement in statements:
                waiting += self._statement(statement, scope, conditional)

    def _statement(
        self, node: ast.stmt, scope: _Scope, conditional: bool
    ) -> Iterator[tuple[list[ast.stmt], _Scope, bool]]:
        """Bind what one statement binds; the bodies in it come out."""

        def bind(name: str, value: ast.expr | None, what: str) -> None:
            end = node.end_lineno or node.lineno
            binding = _Binding(node.lineno, end, value, what, conditional)
            scope.bindings.setdefault(name, []).append(binding)

        for part in _own_expressions(node):
            if isinstance(part, ast.Name):
                self.scope_of[id(part)] = scope
                if isinstance(part.ctx, ast.Del) or (
                    isinstance(part.ctx, ast.Store) and not isinstance(node, ast.Assign | ast.AnnAssign)
                ):
                    bind(part.id, None, f"line {node.lineno} sets it as the script runs")
            elif isinstance(part, ast.Call):
                self.calls.append(part)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bind(node.name, None, f"{node.name}()")
            inside = _Scope(scope)
            every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            extra = (node.args.vararg, node.args.kwarg)
            for argument in (*every, *(item for item in extra if item)):
                what = f"it is an argument of {node.name}"
                inside.bindings[argument.arg] = [_Binding(node.lineno, node.lineno, None, what, False)]
            yield node.body, inside, conditional
        elif isinstance(node, ast.ClassDef):
            bind(node.name, None, f"{node.name}()")
            for base in node.bases:
                self.subclasses[node.name] = (called(base).rpartition(".")[2], node.lineno)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                bind(
                    alias.asname or alias.name.partition(".")[0], None, f"{module}.{alias.name}()".lstrip(".")
                )
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, conditional, bind)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value, conditional, bind)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute | ast.Subscript):
            self.effects.append(Effect(node.target, None, conditional))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self.effects.append(Effect(node.value, None, conditional))
        main = isinstance(node, ast.If) and called(node.test) == "__name__"
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                certain = main or isinstance(node, ast.With | ast.AsyncWith)
                yield getattr(node, name, []), scope, conditional or not certain
        for handler in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield handler.body, scope, True

    def _assign(
        self, target: ast.expr, value: ast.expr, conditional: bool, bind: Callable[..., None]
    ) -> None:
        if isinstance(target, ast.Name):
            bind(target.id, value, "")
        elif isinstance(target, ast.Tuple | ast.List):
            same = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            parts = (
                value.elts if same and isinstance(value, ast.Tuple | ast.List) else [None] * len(target.elts)
            )
            for inner, part in zip(target.elts, parts, strict=True):
                name = inner.value if isinstance(inner, ast.Starred) else inner
                if isinstance(name, ast.Name):
                    bind(name.id, part, f"{shown(ast.unparse(value), 40)} gives it as the script runs")
        else:
            self.effects.append(Effect(target, value, conditional))

    def meant(self, node: ast.expr, names: set[str] | None = None) -> ast.expr | Unknown:
        """The expression that a name stands for; `names` gets the names on the way."""
        for _ in range(MOST_DEPTH):
            if not isinstance(node, ast.Name):
                return node
            if names is not None:
                names.add(node.id)
            scope: _Scope | None = self.scope_of.get(id(node))
            own = True
            while scope is not None and node.id not in scope.bindings:
                scope, own = scope.parent, False
            bindings = sorted(scope.bindings[node.id], key=lambda item: item.line) if scope else []
            before = [item for item in bindings if item.end < node.lineno] if own else bindings
            if not before:
                return Unknown(f"the script does not say what {node.id} is")
            if len(before) > 1 and (not own or any(item.conditional for item in before)):
                lines = ", ".join(str(item.line) for item in before[:5])
                return Unknown(f"{node.id} is set in lines {lines}")
            binding = before[-1]
            if binding.value is None:
                return Unknown(binding.what, binding.what)
            node = binding.value
        return Unknown("it is one name after the other")

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Text, numbers, lists and dictionaries; a function or class of the script is `name()`."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise ImportSourceError("the script computes its values in too many steps: write them out")
        found = self.meant(node)
        if isinstance(found, Unknown):
            return found.text if found.text.endswith("()") else found
        if depth > MOST_DEPTH:
            return Unknown("it is too deeply nested")
        if isinstance(found, ast.Constant):
            plain = found.value is None or isinstance(found.value, str | int | float)
            return found.value if plain else Unknown("it is no text or number")
        if isinstance(found, ast.List | ast.Tuple | ast.Set):
            return self._whole([self.value(item, depth + 1) for item in found.elts])
        if isinstance(found, ast.Dict):
            return self._dictionary(found, depth)
        if isinstance(found, ast.UnaryOp | ast.BinOp):
            return self._computed(found, depth)
        if isinstance(found, ast.JoinedStr):
            return self._text(found, depth)
        name = called(found)
        if isinstance(found, ast.Attribute) and name.startswith("torch."):
            return found.attr
        if isinstance(found, ast.Call):
            if name == "dict" and not found.args:
                keys: list[ast.expr | None] = [
                    ast.Constant(item.arg) if item.arg else None for item in found.keywords
                ]
                return self._dictionary(ast.Dict(keys, [item.value for item in found.keywords]), depth)
            return Unknown(f"only running {shown(name or 'it', 40)}() tells")
        return Unknown(f"{shown(ast.unparse(found), 60)} is no text or number of the script")

    @staticmethod
    def _whole(items: list[Any]) -> Any:
        return next((item for item in items if isinstance(item, Unknown)), items)

    def _dictionary(self, node: ast.Dict, depth: int) -> Any:
        result: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.value(value, depth + 1)
            if key is None and isinstance(inner, Mapping):
                result.update(inner)
            elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                result[key.value] = inner
            else:
                return inner if isinstance(inner, Unknown) else Unknown("it has keys that are no texts")
        return result

    def _computed(self, node: ast.UnaryOp | ast.BinOp, depth: int) -> Any:
        unknown = Unknown(f"{shown(ast.unparse(node), 60)} is not computed")
        if isinstance(node, ast.UnaryOp):
            inner = self.value(node.operand, depth + 1)
            if isinstance(node.op, ast.USub) and isinstance(inner, int | float):
                return -inner
            return not inner if isinstance(node.op, ast.Not) and isinstance(inner, bool) else unknown
        sides = [self.value(side, depth + 1) for side in (node.left, node.right)]
        texts = isinstance(node.op, ast.Add) and all(isinstance(side, str) for side in sides)
        if texts and sum(map(len, sides)) <= _LONGEST_TEXT:
            return sides[0] + sides[1]
        apply = _OPERATORS.get(type(node.op))
        if apply is None or not all(isinstance(s, int | float) and abs(s) < _LARGEST_NUMBER for s in sides):
            return next((side for side in sides if isinstance(side, Unknown)), unknown)
        return unknown if isinstance(node.op, ast.Div | ast.FloorDiv) and not sides[1] else apply(*sides)

    def _text(self, node: ast.JoinedStr, depth: int) -> Any:
        parts: list[str] = []
        missing: Unknown | None = None
        for part in node.values:
            inner = self.value(part.value if isinstance(part, ast.FormattedValue) else part, depth + 1)
            plain = not isinstance(part, ast.FormattedValue) or (
                part.conversion == -1 and not part.format_spec
            )
            if isinstance(inner, str | int | float) and plain and sum(map(len, parts)) < _LONGEST_TEXT:
                parts.append(str(inner))
            else:
                missing = inner if isinstance(inner, Unknown) else Unknown("it is formatted")
                parts.append("?")
        text = "".join(parts)
        return Unknown(missing.why, text, text.partition("?")[0]) if missing else text


def _own_expressions(node: ast.stmt) -> Iterator[ast.AST]:
    """All expressions of a statement without those of statements in it."""
    waiting: list[ast.AST] = [
        child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt | ast.ExceptHandler)
    ]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, ast.stmt):
            yield part
            waiting += ast.iter_child_nodes(part)


def called(node: ast.expr) -> str:
    """The dotted name of an expression or of the function that it calls; `__name__` for a test of it."""
    if isinstance(node, ast.Compare):
        node = node.left
    if isinstance(node, ast.Call):
        node = node.func
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ".".join(reversed(parts))
