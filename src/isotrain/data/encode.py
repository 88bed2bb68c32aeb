"""Rows to samples for supervised training, and to prompts for online algorithms.

P: tokens of one prompt.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from isotrain.data.chat import ChatTemplate, encode_prompt_text, encode_text
from isotrain.data.formats import ColumnNames, Format, Text, detect, normalise, prompt_of
from isotrain.data.items import PICTURE_ROWS, PICTURES, SAMPLES, Item, Sample, samples_with_pictures
from isotrain.data.picture_rows import RowPictures, refuse_pictures
from isotrain.data.pictures import Picture, PictureFiles, rows_of, stored_rows
from isotrain.data.rows import Row
from isotrain.data.store import Codec, Columns, Ragged
from isotrain.errors import DataError

TooLong = Literal["error", "truncate", "drop", "truncate-left", "truncate-middle"]


class Encoder:
    """The first row decides the format; every row after it must fit. None stands for a row left out."""

    name: ClassVar[str] = "samples"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        format: Format,
        prompt_key: str,
        completion_key: str,
        max_length: int,
        too_long: TooLong,
        pictures: dict[str, Any] | None = None,
    ) -> None:
        """`pictures`: arguments of `RowPictures`, for vision-language models."""
        self.tokenizer = tokenizer
        self.max_length, self.too_long = max_length, too_long
        self.pictures = None if pictures is None else RowPictures(**pictures)
        self.codec = SAMPLES if self.pictures is None else samples_with_pictures(self.pictures.files)
        self.arguments: dict[str, Any] = {
            "pictures": pictures,
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
        return {**_settings(self.arguments, self.pictures), "has_template": self._columns.has_template}

    def __call__(self, row: Row) -> Sample | None:
        if self._format == "auto":
            self._format = detect(row, self._columns)
        parts = normalise(row, self._format, self._columns)
        try:
            parts, pictures = _read_pictures(self.pictures, row, parts)
            if isinstance(parts, Text):
                sample = encode_text(self.tokenizer, parts)
            else:
                assert self._template is not None
                sample = self._template.encode(parts)
            if self.pictures is not None:
                sample = self.pictures.placed(sample, pictures)
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
            sample = replace(sample, mask_T=mask_T)
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
    load: Callable[[], tuple[Picture, ...]] = tuple
    """Reads its pictures: most who open a store of prompts need none."""

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return self.load()

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


def _write(prompt: Prompt) -> Columns:
    return {_TOKENS: prompt.tokens_P, _ROWS: np.frombuffer(prompt.line, np.uint8)}


_LAYOUT = (
    Ragged("tokens", {_TOKENS: "<i4"}, "offsets.bin"),
    Ragged("row_bytes", {_ROWS: "|u1"}, "row_offsets.bin"),
)
PROMPTS = Codec(PROMPT_VERSION, _LAYOUT, _write, _read)


def prompts_with_pictures(files: PictureFiles) -> Codec[Prompt]:
    return Codec(
        PROMPT_VERSION,
        (*_LAYOUT, PICTURE_ROWS),
        lambda prompt: {**_write(prompt), PICTURES: stored_rows(prompt.pictures)},
        lambda columns: replace(_read(columns), load=partial(_load, files, columns[PICTURES])),
    )


def _load(files: PictureFiles, stored: npt.NDArray[np.int64]) -> tuple[Picture, ...]:
    return tuple(files.load(row) for row in rows_of(stored))


class PromptEncoder:
    """A row's prompt as token ids, up to where the response begins. None stands for a row left out."""

    name: ClassVar[str] = "prompts"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_key: str,
        max_length: int,
        too_long: TooLong,
        pictures: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.pictures = None if pictures is None else RowPictures(**pictures)
        self.codec = PROMPTS if self.pictures is None else prompts_with_pictures(self.pictures.files)
        self.prompt_key, self.max_length, self.too_long = prompt_key, max_length, too_long
        self.arguments: dict[str, Any] = {
            "pictures": pictures,
            "prompt_key": prompt_key,
            "max_length": max_length,
            "too_long": too_long,
        }
        self._template = ChatTemplate(tokenizer) if tokenizer.chat_template else None

    @property
    def settings(self) -> dict[str, Any]:
        """Everything the prompts depend on besides rows and tokenizer."""
        return {"prompts": PROMPT_VERSION, **_settings(self.arguments, self.pictures)}

    def __call__(self, row: Row) -> npt.NDArray[np.int32] | None:
        sample = self._encoded(row)
        return None if sample is None else sample.tokens_T

    def _encoded(self, row: Row) -> Sample | None:
        prompt = prompt_of(row, self.prompt_key, has_template=self._template is not None)
        try:
            prompt, pictures = _read_pictures(self.pictures, row, prompt)
            if isinstance(prompt, str):
                prompt_P = np.array(encode_prompt_text(self.tokenizer, prompt), np.int32)
            else:
                assert self._template is not None
                prompt_P = self._template.encode_prompt(prompt)
            sample = Sample(prompt_P, np.zeros(len(prompt_P), np.bool_))
            if self.pictures is not None:
                sample = self.pictures.placed(sample, pictures)
                prompt_P = sample.tokens_T
        except DataError as error:
            raise DataError(f"{row.origin}: {error}") from error
        if len(prompt_P) == 0:
            raise DataError(f"{row.origin}: '{self.prompt_key}' has no token; no response can be generated")
        if len(prompt_P) <= self.max_length:
            return sample
        if self.too_long == "drop":
            return None
        if self.too_long != "error":
            prompt_P = cut(prompt_P, self.max_length, self.too_long)
            return Sample(prompt_P, np.zeros(len(prompt_P), np.bool_))
        raise DataError(
            f"{row.origin}: the prompt has {len(prompt_P)} tokens, but data.max_length is {self.max_length}; "
            "raise it, or set data.too_long to 'drop'"
        )

    def values(self, row: Row) -> list[Prompt]:
        if (sample := self._encoded(row)) is None:
            return []
        line = json_line(row if self.pictures is None else self.pictures.without_bytes(row))
        return [Prompt(sample.tokens_T, line, lambda: sample.pictures)]


def _settings(arguments: dict[str, Any], pictures: RowPictures | None) -> dict[str, Any]:
    """What a store is named by; without pictures it is as before there were any."""
    others = {name: value for name, value in arguments.items() if name != "pictures"}
    return others if pictures is None else {**others, "pictures": pictures.settings}


def _read_pictures(pictures: RowPictures | None, row: Row, conversation: Any) -> tuple[Any, list[Picture]]:
    if pictures is not None:
        return pictures.read(row, conversation)
    refuse_pictures(conversation)
    return conversation, []


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
