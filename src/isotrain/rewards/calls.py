"""Rewards that are computed in child processes: what these load, are asked and reply."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from isotrain.errors import RewardError, one_line
from isotrain.process.pool import Calls
from isotrain.rewards.base import FAILURES, RewardInput, Scored
from isotrain.rewards.function import RewardFunction, load_function, load_plugin, read_result
from isotrain.rewards.mathematics import PythonRefused, load_math
from isotrain.user_file import where


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
