"""Preference rows to samples with their labels.

T: tokens of one sample, V: labels of an item.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from isotrain.data.encode import Encoder, TooLong
from isotrain.data.items import ITEMS, Item
from isotrain.data.preference_rows import read_pair, read_responses, read_steps
from isotrain.data.prompts import PromptEncoder
from isotrain.data.rows import Row
from isotrain.data.sample import Sample
from isotrain.data.steps import join_steps, separator_tokens
from isotrain.errors import DataError

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
