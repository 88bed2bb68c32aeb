"""A Python file of the user's, and what `file.py:name` in a recipe names in it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from symtable import symtable
from types import CodeType, ModuleType
from typing import Any

from isotrain.errors import IsotrainError

MODULE = "isotrain_user_file"
"""Its name as a module: a process imports one at most."""

Error = type[IsotrainError]


def find(path: str, field: str, error: Error) -> tuple[Path, str]:
    """File and name of `file.py:name`; the file is there. Errors name the recipe's `field`."""
    file_name, _, name = path.rpartition(":")
    file = Path(file_name)
    if not file.is_file():
        raise error(
            f"{field}: there is no file {file_name} in {os.getcwd()}; write the path "
            "relative to the directory that training starts in, or in full"
        )
    return file, name


def read(path: str, field: str, error: Error) -> str:
    """The text of the file."""
    file, _ = find(path, field, error)
    try:
        return importlib.util.decode_source(file.read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError) as problem:
        raise error(f"{field}: {file} cannot be read: {problem}") from None


def check(path: str, kind: str, field: str, error: Error) -> None:
    """Raise what `load` would, as far as the text shows it, without running the file."""
    file, name = find(path, field, error)
    source = read(path, field, error)
    try:
        tree, symbols = ast.parse(source), symtable(source, str(file), "exec").get_symbols()
    except SyntaxError as problem:
        raise error(f"{file}:{problem.lineno}: {problem.msg}") from None
    except (ValueError, RecursionError) as problem:
        raise error(f"{field}: {file} cannot be read: {problem}") from None
    if any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(tree)):
        return  # it may come from there
    known = {symbol.get_name(): symbol for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    if name not in known:
        raise error(_missing(file, name, kind, field, sorted(k for k in known if known[k].is_namespace())))


def load(path: str, source: str, kind: str, field: str, error: Error) -> tuple[Path, Any]:
    """The file, and the `kind` of thing that `path` names in its text; errors have file and line."""
    file_name, _, name = path.rpartition(":")
    file = Path(file_name)
    module = _import(file, source, error)
    target = getattr(module, name, None)
    if not callable(target):
        is_kind = inspect.isclass if kind == "class" else inspect.isfunction
        known = sorted(k for k, v in vars(module).items() if is_kind(v) and v.__module__ == MODULE)
        raise error(_missing(file, name, kind, field, known))
    return file, target


def _missing(file: Path, name: str, kind: str, field: str, known: list[str]) -> str:
    has = f"; it has {', '.join(known)}" if known else ""
    return f"{field}: {file} has no {kind} {name}{has}"


class _SourceInPlace(SourceFileLoader):
    """Imports a text in place of its file, which may have changed since it was read."""

    def __init__(self, file: Path, source: str) -> None:
        super().__init__(MODULE, str(file))
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.source, self.path)
        return code


def _import(file: Path, source: str, error: Error) -> ModuleType:
    # As for a script: files beside it can be imported, and what is in the working directory, too.
    sys.path.insert(0, str(file.parent.resolve()))
    sys.path.append(os.getcwd())
    spec = importlib.util.spec_from_file_location(MODULE, file, loader=_SourceInPlace(file, source))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as problem:
        raise error(f"{problem.filename or file}:{problem.lineno}: {problem.msg}") from None
    except (Exception, SystemExit) as problem:
        raise error(f"{where(problem, file)} while the file was imported") from None
    return module


def where(error: BaseException, file: Path | None = None) -> str:
    """`file:line: Type: message`, with the innermost line of the user's file if the error came through it."""
    frames = traceback.extract_tb(error.__traceback__)
    user_file = str(file) if file else getattr(sys.modules.get(MODULE), "__file__", None)
    inside = [
        frame
        for frame in frames
        if user_file and os.path.abspath(frame.filename) == os.path.abspath(user_file)
    ]
    place = "".join(
        f"{os.path.basename(frame.filename)}:{frame.lineno}: " for frame in (inside or frames)[-1:]
    )
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    return f"{place}{type(error).__name__}: {message}"
