"""A user's reward function: loaded from its file, called by the names of its parameters."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from symtable import symtable
from types import CodeType, ModuleType
from typing import Any

from isotrain.errors import RewardError
from isotrain.plugins import REWARDS, find_plugin

MODULE = "isotrain_reward_file"
MOST_PARTS = 64
LONGEST_PART_NAME = 64

# What a function may ask for by naming a parameter; the second line are verl's words for the same.
ARGUMENTS: dict[str, Callable[[str, Any, Mapping[str, Any]], Any]] = {
    "response": lambda response, answer, row: response,
    "answer": lambda response, answer, row: answer,
    "row": lambda response, answer, row: row,
    "solution_str": lambda response, answer, row: response,
    "ground_truth": lambda response, answer, row: answer,
    "data_source": lambda response, answer, row: row.get("data_source"),
    "extra_info": lambda response, answer, row: row.get("extra_info") or {},
}


@dataclass(frozen=True)
class RewardFunction:
    function: Callable[..., Any]
    names: tuple[str, ...]
    asynchronous: bool

    def call(self, response: str, answer: Any, row: Mapping[str, Any]) -> Any:
        """What the function returns; for an async one, what is to be awaited."""
        return self.function(**{name: ARGUMENTS[name](response, answer, row) for name in self.names})


def function_setup(path: str, source: str) -> dict[str, Any]:
    """What a child process needs to know of a function; `source` is the text of its file."""
    return {"kind": "function", "path": path, "source": source}


def load_function(path: str, source: str) -> RewardFunction:
    """The function that `file.py:function` names; a `RewardError` gives file and line of a mistake."""
    file_name, _, name = path.rpartition(":")
    file = Path(file_name)
    module = _import(file, source)
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == MODULE
        )
        raise _no_function(file, name, known)
    return _called(function, name, str(file))


def plugin_setup(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a reward of an installed package, which is imported in the child alone."""
    return {"kind": "plugin", "name": name, "options": dict(options)}


def load_plugin(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """A reward of an installed package: a function like a user's own, with options by their names."""
    plugin = find_plugin(REWARDS, name, "reward.plugin.name")
    function = plugin.load()
    if not callable(function):
        raise plugin.wrong("is not a function")
    if taken := sorted(options.keys() & ARGUMENTS.keys()):
        raise plugin.wrong(f"cannot take the option {taken[0]!r}: isotrain sets this argument")
    plugin.check_options(function, options)
    return _called(partial(function, **options) if options else function, name, plugin.package)


def _called(function: Callable[..., Any], name: str, place: str) -> RewardFunction:
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    )
    return RewardFunction(function, _names(function, name, place), asynchronous)


def function_file(path: str) -> tuple[Path, str]:
    """File and function of `file.py:function`; the file is there."""
    file_name, _, name = path.rpartition(":")
    file = Path(file_name)
    if not file.is_file():
        raise RewardError(
            f"reward.function.path: there is no file {file_name} in {os.getcwd()}; write the path "
            "relative to the directory that training starts in, or in full"
        )
    return file, name


def check_function(path: str) -> None:
    """Raise what `load_function` would, as far as the text shows it, without running the file."""
    file, name = function_file(path)
    source = read_source(path)
    try:
        tree, symbols = ast.parse(source), symtable(source, str(file), "exec").get_symbols()
    except SyntaxError as error:
        raise RewardError(f"{file}:{error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise RewardError(f"reward.function.path: {file} cannot be read: {error}") from None
    if any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(tree)):
        return  # it may come from there
    known = {symbol.get_name(): symbol for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    if name not in known:
        raise _no_function(file, name, sorted(key for key in known if known[key].is_namespace()))


def _no_function(file: Path, name: str, known: list[str]) -> RewardError:
    has = f"; it has {', '.join(known)}" if known else ""
    return RewardError(f"reward.function.path: {file} has no function {name}{has}")


def read_source(path: str) -> str:
    """The text of the file that `file.py:function` names."""
    file, _ = function_file(path)
    try:
        return importlib.util.decode_source(file.read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise RewardError(f"reward.function.path: {file} cannot be read: {error}") from None


class _Given(SourceFileLoader):
    """Imports a text in place of its file, which may have changed since it was read."""

    def __init__(self, file: Path, source: str) -> None:
        super().__init__(MODULE, str(file))
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.source, self.path)
        return code


def _import(file: Path, source: str) -> ModuleType:
    # As for a script: files beside it can be imported, and what is in the working directory, too.
    sys.path.insert(0, str(file.parent.resolve()))
    sys.path.append(os.getcwd())
    spec = importlib.util.spec_from_file_location(MODULE, file, loader=_Given(file, source))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise RewardError(f"{error.filename or file}:{error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise RewardError(f"{where(error, file)} while the file was imported") from None
    return module


def _names(function: Callable[..., Any], name: str, file_name: str) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    place = f"{file_name}:{code.co_firstlineno}" if code else file_name
    wanted = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in ARGUMENTS and parameter.kind is not parameter.POSITIONAL_ONLY:
            wanted.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise RewardError(
                f"{place}: {name} has an unknown parameter {parameter.name}; "
                f"give it a default, or use some of {', '.join(ARGUMENTS)}"
            )
    if not wanted:
        raise RewardError(f"{place}: {name} must have at least one of the parameters {', '.join(ARGUMENTS)}")
    return tuple(wanted)


def where(error: BaseException, file: Path | None = None) -> str:
    """`file:line: Type: message`, with the innermost line of the user's file if the error came through it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(file) if file else getattr(sys.modules.get(MODULE), "__file__", None)
    inside = [frame for frame in frames if own and os.path.abspath(frame.filename) == os.path.abspath(own)]
    place = "".join(
        f"{os.path.basename(frame.filename)}:{frame.lineno}: " for frame in (inside or frames)[-1:]
    )
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    return f"{place}{type(error).__name__}: {message}"


def read_result(result: Any) -> tuple[float, dict[str, float]]:
    """Score and further parts of what a function returned; raises `ValueError` where that is no score."""
    if not isinstance(result, Mapping):
        return _finite(result, "the function returned"), {}
    if "score" not in result:
        raise ValueError("the function returned a dict without 'score'")
    score = _finite(result["score"], "the function returned as 'score'")
    parts: dict[str, float] = {}
    for key, value in result.items():
        number = _number(value)
        if key != "score" and isinstance(key, str) and number is not None and math.isfinite(number):
            parts[key[:LONGEST_PART_NAME]] = number
    if len(parts) > MOST_PARTS:
        raise ValueError(
            f"the function returned {len(parts)} numbers beside 'score'; {MOST_PARTS} are allowed"
        )
    return score, parts


def _finite(value: Any, what: str) -> float:
    number = _number(value)
    if number is None:
        hint = "; await it, or write the function as async def" if inspect.isawaitable(value) else ""
        raise ValueError(f"{what} a {type(value).__name__}, not a number{hint}")
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}")
    return number


def _number(value: Any) -> float | None:
    """Python's numbers and whatever else has a float value, such as a tensor with one element; never text."""
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)
    except Exception:
        return None
