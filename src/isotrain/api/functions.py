"""From a Python function to the `FILE.py:FUNCTION` that a recipe names: text, never a pickle."""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from symtable import SymbolTable, symtable
from types import FunctionType, ModuleType
from typing import Any

from isotrain.errors import RewardError
from isotrain.observe.run_directory import write_atomically

FILE = "reward.py"
_IN_A_FILE = "or put it in a file of its own and import it from there"


def function_path(function: Callable[..., Any], run: Path) -> str:
    """Where the function is; one from a notebook, a script or another function is written to `run` first."""
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise RewardError(f"reward: {function!r} has no source text; write it with def")
    module = inspect.getmodule(function)
    file = getattr(module, "__file__", None)
    # A script is not imported by its rewards: it would start the training once more.
    if (
        file
        and function.__module__ != "__main__"
        and getattr(module, function.__qualname__, None) is function
    ):
        return f"{_from_here(Path(file))}:{function.__name__}"
    source = _text(function)
    run.mkdir(parents=True, exist_ok=True)
    write_atomically(run / FILE, f"from __future__ import annotations\n\n{source}")
    return f"{run / FILE}:{function.__name__}"


def _from_here(file: Path) -> str:
    """As the recipe of a colleague would have it, where the file is below the working directory."""
    here = Path(os.getcwd()).resolve()
    whole = file.resolve()
    return str(whole.relative_to(here) if whole.is_relative_to(here) else whole)


def _text(function: FunctionType) -> str:
    """The function's own text, which uses nothing that is not in it."""
    name = function.__name__
    try:
        source = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        raise RewardError(
            f"reward: Python cannot find the source text of {name}; write it in a file and import it "
            f"from there, or set reward.function.path={FILE}:{name}"
        ) from None
    used = dict.fromkeys(_names_outside(tree))
    if not used:
        return source
    known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    hints = "; ".join(_hint(outside, known.get(outside)) for outside in used)
    raise RewardError(
        f"reward: {name} uses names from outside the function, which reward processes do not see: "
        f"{hints}; {_IN_A_FILE}"
    )


def _hint(name: str, value: object) -> str:
    if isinstance(value, ModuleType):
        alias = "" if value.__name__ == name else f" as {name}"
        return f"write 'import {value.__name__}{alias}' inside the function"
    module = getattr(value, "__module__", None)
    if module not in (None, "__main__") and getattr(value, "__name__", None) == name:
        return f"write 'from {module} import {name}' inside the function"
    what = f"'def {name}'" if inspect.isfunction(value) else name
    return f"move {what} inside the function"


def _names_outside(tree: ast.Module) -> Iterator[str]:
    """Names that the text reads and neither defines nor finds among the built-in ones."""
    for node in ast.walk(tree):
        # Annotations are never evaluated: the first line of the written file sees to that.
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    top = symtable(ast.unparse(tree), FILE, "exec")
    defined = {
        symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()
    }
    for table in _tables(top):
        for symbol in table.get_symbols():
            name = symbol.get_name()
            outside = symbol.is_global() if table is not top else not symbol.is_assigned()
            if outside and symbol.is_referenced() and name not in defined and not hasattr(builtins, name):
                yield name


def _tables(table: SymbolTable) -> Iterator[SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
