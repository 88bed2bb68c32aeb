"""Reward functions: loaded from a file or package, and called in a child process by names of parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from isotrain import user_file
from isotrain.errors import RewardError, one_line
from isotrain.plugins import REWARDS, find_plugin
from isotrain.process.pool import Calls
from isotrain.rewards.base import FAILURES, RewardInput, Scored
from isotrain.rewards.mathematics import PythonRefused, load_math
from isotrain.user_file import where

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


def load(kind: str, **setup: Any) -> Callable[[Mapping[str, Any]], Any]:
    """In the child: a function of a request, async if the user's is, that returns the reply."""
    if kind == "math":
        function = RewardFunction(load_math(), ("response", "answer"), asynchronous=False)
    else:
        function = load_plugin(**setup) if kind == "plugin" else load_function(**setup)

    def call(request: Mapping[str, Any]) -> Any:
        return function.call(request["response"], request["answer"], request["row"])

    def score(request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return _reply(call(request))
        except PythonRefused as error:  # no Exception, and yet no crash
            return {"failure": "error", "detail": one_line(where(error))}

    async def score_async(request: Mapping[str, Any]) -> dict[str, Any]:
        return _reply(await call(request))

    return score_async if function.asynchronous else score


def _reply(returned: Any) -> dict[str, Any]:
    try:
        score, parts = read_result(returned)
    except ValueError as error:
        return {"failure": "error", "detail": one_line(str(error))}
    return {"score": score, "parts": parts}


def _scored(message: Mapping[str, Any]) -> Scored | None:
    """A reply as a result; None if it is invalid, since the child runs code that we did not write."""
    failure, detail = message.get("failure"), message.get("detail", "")
    if failure is not None:
        known = failure in FAILURES and isinstance(detail, str)
        return Scored(0.0, failure=failure, detail=one_line(detail)) if known else None
    score, parts = message.get("score"), message.get("parts")
    if not isinstance(parts, dict):
        return None
    if not all(_is_finite(value) for value in (score, *parts.values())):
        return None
    return Scored(float(cast(float, score)), {str(key): float(value) for key, value in parts.items()})


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


REWARD_CALLS = Calls[RewardInput, Scored](
    load=f"{__name__}:load",
    child="the reward process",
    error=RewardError,
    write=lambda item: {"response": item.response, "answer": item.answer, "row": dict(item.row)},
    read=_scored,
)
