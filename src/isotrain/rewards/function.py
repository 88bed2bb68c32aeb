"""A user's reward function: loaded from its file, called by the names of its parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isotrain import user_file
from isotrain.errors import RewardError
from isotrain.plugins import REWARDS, find_plugin

FIELD = "reward.function.path"
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
        """Call the user's function; an async one returns a coroutine."""
        return self.function(**{name: ARGUMENTS[name](response, answer, row) for name in self.names})


def load_function(path: str, source: str) -> RewardFunction:
    """The function that `file.py:function` names; a `RewardError` gives file and line of a mistake."""
    file, function = user_file.load(path, source, "function", FIELD, RewardError)
    return _called(function, path.rpartition(":")[2], str(file))


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
    return user_file.find(path, FIELD, RewardError)


def check_function(path: str) -> None:
    """Raise what `load_function` would, as far as the text shows it, without running the file."""
    user_file.check(path, "function", FIELD, RewardError)


def read_source(path: str) -> str:
    """The text of the file that `file.py:function` names."""
    return user_file.read(path, FIELD, RewardError)


def _names(function: Callable[..., Any], name: str, file_name: str) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    place = f"{file_name}:{code.co_firstlineno}" if code else file_name
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in ARGUMENTS and parameter.kind is not parameter.POSITIONAL_ONLY:
            names.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise RewardError(
                f"{place}: {name} has an unknown parameter {parameter.name}; "
                f"give it a default, or use some of {', '.join(ARGUMENTS)}"
            )
    if not names:
        raise RewardError(f"{place}: {name} must have at least one of the parameters {', '.join(ARGUMENTS)}")
    return tuple(names)


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
