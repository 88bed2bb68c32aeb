"""Prompts of online algorithms tokenised once, beside the rows that rewards look at.

P: tokens of one prompt.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from isotrain.data.chat import ChatTemplate, encode_prompt_text
from isotrain.data.encode import TooLong
from isotrain.data.formats import prompt_of
from isotrain.data.mapped import Entry, Mapped, Progress, Ragged, build_mapped
from isotrain.data.rows import Row, read_rows, source_digest
from isotrain.data.store import store_key
from isotrain.errors import DataError

# Raise it when the same rows and settings give other prompts than before, or the files another layout.
PROMPT_VERSION = 1

_TOKENS, _ROWS = "tokens.bin", "rows.jsonl"
_LAYOUT = (
    Ragged("tokens", {_TOKENS: "<i4"}, "offsets.bin"),
    Ragged("row_bytes", {_ROWS: "|u1"}, "row_offsets.bin"),
)


class PromptEncoder:
    """A row's prompt as token ids, up to where the response begins. None stands for a row left out."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_key: str, max_length: int, too_long: TooLong
    ) -> None:
        if too_long == "truncate":
            raise DataError(
                "data.too_long: truncate cuts the end off, and a prompt without its end asks something else; "
                "set data.too_long to 'error' or 'drop'"
            )
        self.tokenizer = tokenizer
        self.prompt_key = prompt_key
        self.max_length = max_length
        self.too_long = too_long
        self._template = ChatTemplate(tokenizer) if tokenizer.chat_template else None

    @property
    def settings(self) -> dict[str, Any]:
        """All that the prompts depend on besides rows and tokenizer."""
        return {
            "prompts": PROMPT_VERSION,
            "prompt_key": self.prompt_key,
            "max_length": self.max_length,
            "too_long": self.too_long,
        }

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
        raise DataError(
            f"{row.origin}: the prompt has {len(prompt_P)} tokens, but data.max_length is {self.max_length}; "
            "raise it, or set data.too_long to 'drop'"
        )


class PromptStore:
    """Prompts and their rows by number. Only the pages that are read take memory."""

    def __init__(self, mapped: Mapped) -> None:
        meta = mapped.meta
        self.directory = mapped.directory
        self.rows: int = meta["rows"]
        """Rows that were read."""
        self.dropped: int = meta["dropped"]
        """Rows that were left out."""
        self.tokens: int = meta["tokens"]
        self.digest: str = meta["digest"]
        """SHA-256 over the SHA-256 sums of tokens, rows and bounds: the identity of the training data."""
        self.lengths: npt.NDArray[np.int64] = np.diff(mapped.offsets[_TOKENS])
        self._mapped = mapped

    @classmethod
    def open(cls, directory: Path) -> PromptStore:
        """An existing store; files that do not fit their description are an error."""
        return cls(Mapped.open(directory, _LAYOUT))

    def __len__(self) -> int:
        return len(self.lengths)

    def prompt(self, number: int) -> npt.NDArray[np.int32]:
        # A copy: prompts outlive the map.
        return np.array(self._mapped.get(_TOKENS, number), np.int32)

    def row(self, number: int) -> dict[str, Any]:
        """All values of the row that a prompt came from."""
        line = self._mapped.get(_ROWS, number).tobytes()
        try:
            values = json.loads(line)
        except ValueError as error:
            raise self._damaged(number) from error
        if not isinstance(values, dict):
            raise self._damaged(number)
        return values

    def _damaged(self, number: int) -> DataError:
        return DataError(f"{self.directory / _ROWS}: entry {number} is damaged; delete {self.directory}")


def cached_prompts(
    source: str | Sequence[str], encoder: PromptEncoder, root: Path, progress: Progress | None = None
) -> PromptStore:
    """The prompts of a source under `root`, built if they are not there."""
    key = store_key(source_digest(source), encoder.tokenizer, encoder.settings)
    directory = root / key
    if directory.is_dir():
        return PromptStore.open(directory)
    return build_prompts(read_rows(source), encoder, directory, key, progress)


def build_prompts(
    rows: Iterable[Row],
    encode: Callable[[Row], npt.NDArray[np.int32] | None],
    directory: Path,
    key: str,
    progress: Progress | None = None,
) -> PromptStore:
    """Encode all prompts into a directory that appears whole or not at all."""

    def entry(row: Row) -> Entry | None:
        if (prompt_P := encode(row)) is None:
            return None
        return Entry({_TOKENS: prompt_P, _ROWS: np.frombuffer(_json_line(row), np.uint8)})

    build_mapped(rows, entry, directory, _LAYOUT, {"version": PROMPT_VERSION, "key": key}, progress)
    return PromptStore.open(directory)


def _json_line(row: Row) -> bytes:
    try:
        return json.dumps(row.values, ensure_ascii=False, default=_plain).encode() + b"\n"
    except TypeError:
        culprits = [f"'{name}'" for name, value in row.values.items() if not _is_plain(value)]
        raise DataError(
            f"{row.origin}: rewards get rows as JSON, which cannot hold {', '.join(culprits) or 'its keys'} "
            "(bytes or other objects); leave the column out of the file, or store it as text"
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
