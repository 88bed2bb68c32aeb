"""The meaning of preference rows: pairs, labelled responses, solutions with labelled steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from isotrain.data.formats import value_at
from isotrain.data.rows import Row
from isotrain.errors import DataError

_TURN = "\n\nAssistant:"

PAIR_SHAPES = """the supported formats are
  {"prompt": "...", "chosen": "...", "rejected": "..."}   (strings, or lists of messages)
  {"chosen": [messages], "rejected": [messages]}          (the messages that both begin with are the prompt)
with "margin": a number, if pairs differ in how clear they are"""
RESPONSE_SHAPES = """the shape that works is
  {"prompt": "...", "completion": "...", "label": true}   (strings or lists of messages; true is desirable)
and rows with "chosen" and "rejected", which count as two responses"""
STEP_SHAPES = """the shape that works is
  {"prompt": "...", "completions": ["first step", "second step"], "labels": [true, 0.25]}
with one label for each step: true or false, or the probability that it is right"""


class Pair(NamedTuple):
    """Two rows of prompt and completion with the same prompt."""

    chosen: Row
    rejected: Row
    margin: float | None


class LabelledResponse(NamedTuple):
    response: Row
    desirable: bool


class LabelledSteps(NamedTuple):
    prompt: Row
    steps: list[str]
    labels: list[float]


def read_pair(row: Row, in_turns: bool = False) -> Pair:
    """A preference; UltraFeedback's rows and dialogues as text with `Assistant:` turns work as they are.

    `in_turns`: a text prompt is the user's turn and its responses are the assistant's, not plain text.
    """
    chosen, rejected = _wanted(row, "chosen", PAIR_SHAPES), _wanted(row, "rejected", PAIR_SHAPES)
    if chosen == rejected:
        raise DataError(f"{row.origin}: 'chosen' and 'rejected' are the same; remove the row")
    prompt = row.values.get("prompt")
    if isinstance(chosen, list) and isinstance(rejected, list):
        prompt, chosen, rejected = _split_messages(row, prompt, chosen, rejected)
    elif not (isinstance(chosen, str) and isinstance(rejected, str)):
        raise DataError(f"{row.origin}: 'chosen' and 'rejected' must have the same type; {PAIR_SHAPES}")
    elif prompt is None:
        prompt, chosen, rejected = _split_texts(row, chosen, rejected)
    elif in_turns:
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    margin = row.values.get("margin")
    if margin is not None and (isinstance(margin, bool) or not _is_finite(margin)):
        raise DataError(f"{row.origin}: 'margin' must be a number, not {margin!r}")
    return Pair(
        _completed(row, prompt, chosen, "chosen"),
        _completed(row, prompt, rejected, "rejected"),
        None if margin is None else float(margin),
    )


def read_responses(row: Row) -> list[LabelledResponse]:
    """A labelled response, or the two of a pair."""
    if "chosen" in row.values and "label" not in row.values:
        pair = read_pair(row)
        return [LabelledResponse(pair.chosen, True), LabelledResponse(pair.rejected, False)]
    prompt = _wanted(row, "prompt", RESPONSE_SHAPES)
    completion = _wanted(row, "completion", RESPONSE_SHAPES)
    label = _wanted(row, "label", RESPONSE_SHAPES)
    if label not in (0, 1):
        raise DataError(f"{row.origin}: 'label' must be true or false, not {label!r}")
    return [LabelledResponse(_completed(row, prompt, completion, "completion"), bool(label))]


def read_steps(row: Row) -> LabelledSteps:
    steps, labels = _wanted(row, "completions", STEP_SHAPES), _wanted(row, "labels", STEP_SHAPES)
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) for step in steps):
        raise DataError(f"{row.origin}: 'completions' must be a list of texts; {STEP_SHAPES}")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise DataError(
            f"{row.origin}: 'labels' must be a list with one label for each of {len(steps)} steps"
        )
    for number, label in enumerate(labels):
        if not _is_finite(label) or not 0 <= label <= 1:
            raise DataError(
                f"{row.origin}: labels[{number}] must be true, false or between 0 and 1: {label!r}"
            )
    prompt = {"prompt": _wanted(row, "prompt", STEP_SHAPES), **_tools(row)}
    return LabelledSteps(replace(row, values=prompt), steps, [float(label) for label in labels])


def _split_messages(row: Row, prompt: Any, chosen: list[Any], rejected: list[Any]) -> tuple[Any, Any, Any]:
    """Messages that both sides begin with are the prompt; a `prompt` column may repeat them."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    repeated = not asked or chosen[: len(asked)] == asked or asked[-1:] == chosen[max(shared - 1, 0) : shared]
    if not repeated:
        return [*asked, *chosen[:shared]], chosen[shared:], rejected[shared:]
    if shared:
        return chosen[:shared], chosen[shared:], rejected[shared:]
    if prompt is None:
        raise DataError(
            f"{row.origin}: 'chosen' and 'rejected' do not begin with the same message, and there is no "
            f"'prompt'; {PAIR_SHAPES}"
        )
    return prompt, chosen, rejected


def _split_texts(row: Row, chosen: str, rejected: str) -> tuple[str, str, str]:
    """Whole dialogues as text: the prompt goes up to the last turn of the assistant that both begin with."""
    end = chosen.rfind(_TURN)
    if end < 0 or not rejected.startswith(chosen[: end + len(_TURN)]):
        raise DataError(f"{row.origin}: no 'prompt', and the two texts share none; {PAIR_SHAPES}")
    end += len(_TURN)
    return chosen[:end], chosen[end:], rejected[end:]


def _completed(row: Row, prompt: Any, completion: Any, side: str) -> Row:
    """A row of prompt and completion; errors about it name the side."""
    if isinstance(completion, list) and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    values = {"prompt": prompt, "completion": completion, **_tools(row)}
    return replace(row, values=values, origin=f"{row.origin} ({side})")


def _tools(row: Row) -> dict[str, Any]:
    return {"tools": row.values["tools"]} if "tools" in row.values else {}


def _wanted(row: Row, key: str, shapes: str) -> Any:
    if (value := value_at(row.values, key)) is None:
        columns = ", ".join(f"'{name}'" for name in row.values)
        raise DataError(f"{row.origin}: no '{key}' among the columns {columns}; {shapes}")
    return value


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
