"""Rows to samples for supervised training, and to prompts for online algorithms.

P: tokens of one prompt.
"""

from __future__ import annotations

import datetime
import decimal
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from isotrain.data.chat import ChatTemplate, encode_prompt_text, encode_text
from isotrain.data.formats import ColumnNames, Format, Text, detect, normalise, prompt_of
from isotrain.data.items import SAMPLES, Item, Sample
from isotrain.data.rows import Row
from isotrain.data.store import Codec, Columns, Ragged
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
        self._columns = ColumnNames(prompt_key, completion_key, has_template=bool(tokenizer.chat_template))
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


# Raise it when the same rows and settings give other prompts than before, or the files another layout.
PROMPT_VERSION = 1

_TOKENS, _ROWS = "tokens.bin", "rows.jsonl"


@dataclass(frozen=True)
class Prompt:
    tokens_P: npt.NDArray[np.int32]
    line: bytes
    """The row that the prompt came from, as JSON."""

    @property
    def row(self) -> dict[str, Any]:
        """All values of the row."""
        values = json.loads(self.line)
        if not isinstance(values, dict):
            raise ValueError("a row must be a JSON object")
        return values


def _read(columns: Columns) -> Prompt:
    prompt = Prompt(columns[_TOKENS], columns[_ROWS].tobytes())
    _ = prompt.row  # a damaged row is reported where the store is known
    return prompt


PROMPTS = Codec(
    PROMPT_VERSION,
    (
        Ragged("tokens", {_TOKENS: "<i4"}, "offsets.bin"),
        Ragged("row_bytes", {_ROWS: "|u1"}, "row_offsets.bin"),
    ),
    lambda prompt: {_TOKENS: prompt.tokens_P, _ROWS: np.frombuffer(prompt.line, np.uint8)},
    _read,
)


class PromptEncoder:
    """A row's prompt as token ids, up to where the response begins. None stands for a row left out."""

    name: ClassVar[str] = "prompts"
    codec = PROMPTS

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_key: str, max_length: int, too_long: TooLong
    ) -> None:
        self.tokenizer = tokenizer
        self.prompt_key, self.max_length, self.too_long = prompt_key, max_length, too_long
        self.arguments: dict[str, Any] = {
            "prompt_key": prompt_key,
            "max_length": max_length,
            "too_long": too_long,
        }
        self._template = ChatTemplate(tokenizer) if tokenizer.chat_template else None

    @property
    def settings(self) -> dict[str, Any]:
        """Everything the prompts depend on besides rows and tokenizer."""
        return {"prompts": PROMPT_VERSION, **self.arguments}

    def __call__(self, row: Row) -> npt.NDArray[np.int32] | None:
        prompt = prompt_of(row, self.prompt_key, has_template=self._template is not None)
        try:
            if isinstance(prompt, str):
                prompt_P = np.array(encode_prompt_text(self.tokenizer, prompt), np.int32)
            else:
                assert self._template is not None
                prompt_P = self._template.encode_prompt(prompt)
        except DataError as error:
            raise DataError(f"{row.origin}: {error}") from error
        if len(prompt_P) == 0:
            raise DataError(f"{row.origin}: '{self.prompt_key}' has no token; no response can be generated")
        if len(prompt_P) <= self.max_length:
            return prompt_P
        if self.too_long == "drop":
            return None
        if self.too_long != "error":
            return cut(prompt_P, self.max_length, self.too_long)
        raise DataError(
            f"{row.origin}: the prompt has {len(prompt_P)} tokens, but data.max_length is {self.max_length}; "
            "raise it, or set data.too_long to 'drop'"
        )

    def values(self, row: Row) -> list[Prompt]:
        return [] if (prompt_P := self(row)) is None else [Prompt(prompt_P, json_line(row))]


def cut(prompt_P: npt.NDArray[np.int32], length: int, too_long: TooLong) -> npt.NDArray[np.int32]:
    """The tokens of a long prompt that stay, as verl cuts them.

    `truncate` keeps the beginning, and so loses the generation prompt; `truncate-left` keeps the end,
    `truncate-middle` both, with the larger half at the end.
    """
    if too_long == "truncate":
        return prompt_P[:length]
    if too_long == "truncate-left":
        return prompt_P[-length:]
    assert too_long == "truncate-middle"
    first = length // 2
    return np.concatenate([prompt_P[:first], prompt_P[len(prompt_P) - (length - first) :]])


def json_line(row: Row) -> bytes:
    try:
        return json.dumps(row.values, ensure_ascii=False, default=_plain).encode() + b"\n"
    except TypeError:
        culprits = [f"'{name}'" for name, value in row.values.items() if not _is_plain(value)]
        raise DataError(
            f"{row.origin}: rewards get rows as JSON, which cannot hold {', '.join(culprits) or 'its keys'} "
            "(bytes or other objects); remove the column from the file, or store it as text"
        ) from None


def _plain(value: Any) -> str:
    """Parquet has types that JSON lacks; those with a usual spelling are spelled."""
    if isinstance(value, (datetime.date, datetime.time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, (decimal.Decimal, datetime.timedelta)):
        return str(value)
    raise TypeError(type(value).__name__)


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value, default=_plain)
    except TypeError:
        return False
    return True
