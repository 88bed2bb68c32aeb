"""What an unzipped package defines under a dotted name, read from its sources without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

DEEPEST = 12


@dataclass(frozen=True)
class Definition:
    """Where a name is defined, and how it can be called; no signature where that is not written in Python."""

    where: str
    signature: Signature | None = None


@dataclass(frozen=True)
class Package:
    """A package directory, such as `<site>/torch_npu`."""

    root: Path

    def find(self, symbol: str) -> Definition | None:
        """The definition behind a dotted name that starts with the package's own; re-exports are followed."""
        first, *rest = symbol.split(".")
        assert first == self.root.name, symbol
        return self._find(self.root, rest, DEEPEST)

    def _find(self, module: Path, names: list[str], depth: int) -> Definition | None:
        file = _file(module)
        if file is None or depth == 0:
            return None
        where = file.relative_to(self.root.parent).as_posix()
        if not names:
            return Definition(where)
        name, *rest = names
        # What a module binds itself hides a submodule of that name.
        for node in reversed(list(_bindings(_tree(file)))):
            found = self._bound(node, file, name, rest, depth)
            if found is not None:
                return found
        return self._find(module / name, rest, depth - 1) if module.is_dir() else None

    def _bound(self, node: ast.stmt, file: Path, name: str, rest: list[str], depth: int) -> Definition | None:
        where = f"{file.relative_to(self.root.parent).as_posix()}:{node.lineno}"
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            if isinstance(node, ast.FunctionDef):
                return None if rest else Definition(where, signature(node.args))
            return _member(node, rest, where)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            return Definition(where) if name in bound else None
        if isinstance(node, ast.ImportFrom):
            return self._imported(node, file, name, rest, depth)
        return None

    def _imported(
        self, node: ast.ImportFrom, file: Path, name: str, rest: list[str], depth: int
    ) -> Definition | None:
        source = self._module(node, file)
        for alias in node.names:
            if alias.name == "*" and source is not None and _exports(source, name):
                return self._find(source, [name, *rest], depth - 1)
            if (alias.asname or alias.name) == name:
                if source is None:  # of another package: it exists as far as these sources say
                    return Definition(f"{node.module}.{alias.name}")
                return self._find(source, [alias.name, *rest], depth - 1)
        return None

    def _module(self, node: ast.ImportFrom, file: Path) -> Path | None:
        """The file or directory, without suffix, that an import names; None outside of the package."""
        parts = node.module.split(".") if node.module else []
        if node.level:
            return file.parents[node.level - 1].joinpath(*parts)
        return self.root.parent.joinpath(*parts) if parts[:1] == [self.root.name] else None


def signature(arguments: ast.arguments) -> Signature:
    """As `inspect.signature` would show it, with the defaults' source text in place of their values."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(
        arguments.defaults
    )
    kinds: list[Any] = [Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs)
    kinds += [Parameter.POSITIONAL_OR_KEYWORD] * len(arguments.args)
    parameters = [_parameter(a, kind, d) for a, kind, d in zip(plain, kinds, defaults, strict=True)]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument, Parameter.KEYWORD_ONLY, default))
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> Parameter:
    return Parameter(argument.arg, kind, default=Parameter.empty if default is None else ast.unparse(default))


def _member(node: ast.ClassDef, rest: list[str], where: str) -> Definition | None:
    """A class or a method of it; how a class is called is known where it says so itself."""
    methods = {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}
    if rest:
        found = methods.get(rest[0])
        return None if found is None else Definition(where, _without_self(found))
    constructor = methods.get("__init__") or methods.get("__new__")
    return Definition(where, None if constructor is None else _without_self(constructor))


def _without_self(method: ast.FunctionDef) -> Signature:
    whole = signature(method.args)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _file(module: Path) -> Path | None:
    candidates = (module.with_name(module.name + ".py"), module / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def _bindings(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, also inside `if`, `try` and `with`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _bindings(child)


def _exports(module: Path, name: str) -> bool:
    """Whether `from module import *` brings the name, as far as `__all__` is written as a list."""
    file = _file(module)
    if file is None:
        return False
    for node in _bindings(_tree(file)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return isinstance(node.value, ast.List) and name in {
                element.value for element in node.value.elts if isinstance(element, ast.Constant)
            }
    return not name.startswith("_")
