"""Preference rows (pairs, labelled responses, solutions with labelled steps) to samples with their labels.

T: tokens of one sample, V: labels of an item.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from isotrain.data.encode import Encoder, PromptEncoder, TooLong
from isotrain.data.formats import value_at
from isotrain.data.items import ITEMS, Item, Sample
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


class PreferencePair(NamedTuple):
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


def read_pair(row: Row, in_turns: bool = False) -> PreferencePair:
    """A preference; UltraFeedback's rows and dialogues as text with `Assistant:` turns work as they are.

    `in_turns`: a text prompt is the user's turn and its responses are the assistant's, not plain text.
    """
    chosen, rejected = _required(row, "chosen", PAIR_SHAPES), _required(row, "rejected", PAIR_SHAPES)
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
    return PreferencePair(
        _completed(row, prompt, chosen, "chosen"),
        _completed(row, prompt, rejected, "rejected"),
        None if margin is None else float(margin),
    )


def read_responses(row: Row) -> list[LabelledResponse]:
    """A labelled response, or the two of a pair."""
    if "chosen" in row.values and "label" not in row.values:
        pair = read_pair(row)
        return [LabelledResponse(pair.chosen, True), LabelledResponse(pair.rejected, False)]
    prompt = _required(row, "prompt", RESPONSE_SHAPES)
    completion = _required(row, "completion", RESPONSE_SHAPES)
    label = _required(row, "label", RESPONSE_SHAPES)
    if label not in (0, 1):
        raise DataError(f"{row.origin}: 'label' must be true or false, not {label!r}")
    return [LabelledResponse(_completed(row, prompt, completion, "completion"), bool(label))]


def read_steps(row: Row) -> LabelledSteps:
    steps, labels = _required(row, "completions", STEP_SHAPES), _required(row, "labels", STEP_SHAPES)
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
    prompt = {"prompt": _required(row, "prompt", STEP_SHAPES), **_tools(row)}
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


def _required(row: Row, key: str, shapes: str) -> Any:
    if (value := value_at(row.values, key)) is None:
        columns = ", ".join(f"'{name}'" for name in row.values)
        raise DataError(f"{row.origin}: no '{key}' among the columns {columns}; {shapes}")
    return value


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


Kind = Literal["pairs", "responses", "steps"]


class PreferenceEncoder:
    """One kind of preference rows to items. A row may hold several, or be left out."""

    name: ClassVar[str] = "preference"
    codec = ITEMS

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kind: Kind,
        max_length: int,
        too_long: TooLong,
        step_separator: str | None = "\n",
        *,
        margins: bool = False,
        scored: bool = False,
    ) -> None:
        """`margins`: every pair must have one. `scored`: the pairs train a model that scores responses of a
        policy, so plain text is put into turns where the policy's prompts are; solutions always are.
        """
        self.tokenizer = tokenizer
        assert step_separator is not None or kind != "steps"
        self.arguments: dict[str, Any] = {
            "kind": kind,
            "max_length": max_length,
            "too_long": too_long,
            "step_separator": step_separator if kind == "steps" else None,
            "margins": margins,
            "scored": scored,
        }
        self._max_length, self._too_long = max_length, too_long
        self._margins = margins
        self._in_turns = scored and bool(tokenizer.chat_template)
        self._encode = Encoder(tokenizer, "prompt-completion", "prompt", "completion", max_length, too_long)
        self._prompt = PromptEncoder(
            tokenizer, "prompt", max_length, "drop" if too_long == "drop" else "error"
        )
        self._separator = (
            separator_tokens(tokenizer, step_separator, "algorithm.step_separator")
            if kind == "steps" and step_separator is not None
            else []
        )
        readers: dict[Kind, Callable[[Row], list[Item]]] = {
            "pairs": self._pair,
            "responses": self._responses,
            "steps": self._steps,
        }
        self._read = readers[kind]

    @property
    def settings(self) -> dict[str, Any]:
        """All that the items depend on besides rows and tokenizer."""
        return {"preference": ITEMS.version, **self.arguments}

    def __call__(self, row: Row) -> list[Item]:
        return self._read(row)

    values = __call__

    def _pair(self, row: Row) -> list[Item]:
        pair = read_pair(row, in_turns=self._in_turns)
        if self._margins and pair.margin is None:
            raise DataError(
                f"{row.origin}: no 'margin', but algorithm.margins is true; add a number, such as "
                '"margin": 1.0, or remove algorithm.margins'
            )
        chosen, rejected = self._encode(pair.chosen), self._encode(pair.rejected)
        if chosen is None or rejected is None:
            return []
        if np.array_equal(chosen.tokens_T, rejected.tokens_T):  # nothing to prefer: the gradient is 0
            if self._too_long == "drop":
                return []
            raise DataError(
                f"{row.origin}: 'chosen' and 'rejected' are the same {len(chosen)} tokens; remove the row, "
                f"raise data.max_length ({self._max_length}), or set data.too_long: drop"
            )
        margin = [] if pair.margin is None else [pair.margin]
        return [Item((chosen, rejected), np.array(margin, np.float32))]

    def _responses(self, row: Row) -> list[Item]:
        return [
            Item((sample,), np.array([labelled.desirable], np.float32))
            for labelled in read_responses(row)
            if (sample := self._encode(labelled.response)) is not None
        ]

    def _steps(self, row: Row) -> list[Item]:
        labelled = read_steps(row)
        prompt_P = self._prompt(labelled.prompt)
        if prompt_P is None:
            return []
        sample = join_steps(self.tokenizer, prompt_P.tolist(), labelled.steps, self._separator)
        ends = np.flatnonzero(sample.mask_T)
        if len(sample) > self._max_length:
            if self._too_long == "error":
                raise DataError(
                    f"{row.origin}: {len(sample)} tokens, but data.max_length is {self._max_length}; raise "
                    "it, or set data.too_long to 'truncate' or 'drop'"
                )
            ends = ends[ends < self._max_length]
            if self._too_long == "drop" or not len(ends):
                return []
            # What follows the last whole step has no label.
            sample = Sample(sample.tokens_T[: ends[-1] + 1], sample.mask_T[: ends[-1] + 1])
        return [Item((sample,), np.array(labelled.labels[: len(ends)], np.float32))]


def separator_tokens(tokenizer: PreTrainedTokenizerBase, separator: str, field: str) -> list[int]:
    """`field` is the recipe field of the separator."""
    tokens = list(tokenizer(separator, add_special_tokens=False)["input_ids"])
    if not tokens:
        raise DataError(f"{field} has no token, so steps would have no end; set another text")
    return tokens


def single_token(tokenizer: PreTrainedTokenizerBase, text: str, field: str) -> int:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise DataError(f"{field}: '{text}' is {len(ids)} tokens of this model; set a text that is one token")
    return int(ids[0])


def join_steps(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], steps: Sequence[str], separator: Sequence[int]
) -> Sample:
    """Prompt and steps, marked where steps end: at the last token of the separator after each.

    Training and scoring both take their tokens from here, and the prompt's from `PromptEncoder`: a model
    that scores other tokens than it was trained on gives scores that mean nothing.
    """
    tokens, ends = list(prompt), []
    for step in steps:
        tokens += tokenizer(step, add_special_tokens=False, verbose=False)["input_ids"]
        tokens += separator
        ends.append(len(tokens) - 1)
    mask_T = np.zeros(len(tokens), np.bool_)
    mask_T[ends] = True
    return Sample(np.array(tokens, np.int32), mask_T)


def split_steps(text: str, separator: str) -> list[str]:
    """The steps of a written solution; blank ones are none."""
    return [step for step in text.split(separator) if step.strip()]
