"""Rows to samples: format, tokens, mask and length limit in one callable."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from isotrain.data.chat import ChatTemplate, encode_text
from isotrain.data.formats import Columns, Format, Text, detect, normalise
from isotrain.data.items import SAMPLES, Item
from isotrain.data.rows import Row
from isotrain.data.sample import Sample
from isotrain.errors import DataError

TooLong = Literal["error", "truncate", "drop", "truncate-left", "truncate-middle"]


class Encoder:
    """The first row decides the format; every row after it must fit. None stands for a row left out."""

    name: ClassVar[str] = "samples"
    codec = SAMPLES

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        format: Format,
        prompt_key: str,
        completion_key: str,
        max_length: int,
        too_long: TooLong,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length, self.too_long = max_length, too_long
        self.arguments: dict[str, Any] = {
            "format": format,
            "prompt_key": prompt_key,
            "completion_key": completion_key,
            "max_length": max_length,
            "too_long": too_long,
        }
        self._format: Format = format
        self._columns = Columns(prompt_key, completion_key, has_template=bool(tokenizer.chat_template))
        self._template = ChatTemplate(tokenizer) if tokenizer.chat_template else None

    @property
    def settings(self) -> dict[str, Any]:
        """Everything the samples depend on besides rows and tokenizer."""
        return {**self.arguments, "has_template": self._columns.has_template}

    def __call__(self, row: Row) -> Sample | None:
        if self._format == "auto":
            self._format = detect(row, self._columns)
        parts = normalise(row, self._format, self._columns)
        try:
            if isinstance(parts, Text):
                sample = encode_text(self.tokenizer, parts)
            else:
                assert self._template is not None
                sample = self._template.encode(parts)
        except DataError as error:
            raise DataError(f"{row.origin}: {error}") from error
        return self._fitted(sample, row)

    def values(self, row: Row) -> list[Item]:
        return [] if (sample := self(row)) is None else [Item((sample,))]

    def _fitted(self, sample: Sample, row: Row) -> Sample | None:
        length = len(sample)
        if length > self.max_length:
            if self.too_long == "drop":
                return None
            if self.too_long == "error":
                raise DataError(
                    f"{row.origin}: {length} tokens, but data.max_length is {self.max_length}; raise it, "
                    "or set data.too_long to 'truncate' or 'drop'"
                )
            sample = Sample(sample.tokens_T[: self.max_length], sample.mask_T[: self.max_length])
        if len(sample):
            # Nothing predicts the first token, so no loss can be taken on it.
            mask_T = sample.mask_T.copy()
            mask_T[0] = False
            sample = Sample(sample.tokens_T, mask_T)
        if np.any(sample.mask_T):
            return sample
        if self.too_long == "drop":
            return None
        cut = f" in the first {len(sample)} of its {length}" if length > len(sample) else ""
        raise DataError(f"{row.origin}: no token has loss{cut}; remove the row, or set data.too_long: drop")
