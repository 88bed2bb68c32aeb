"""A data set tokenised once, as memory-mapped files that every rank shares.

T: tokens of one sample.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from isotrain.data.encode import Encoder
from isotrain.data.mapped import Entry, Mapped, Progress, Ragged, build_mapped
from isotrain.data.rows import Row, read_rows, source_digest
from isotrain.data.sample import Sample

# Raise it when the same rows and settings give other samples than before, or the files another layout.
FORMAT_VERSION = 1

_TOKENS, _MASK = "tokens.bin", "mask.bin"
_LAYOUT = (Ragged("tokens", {_TOKENS: "<i4", _MASK: "|u1"}, "offsets.bin"),)


class TokenStore:
    """Samples by number. Only the pages that are read take memory."""

    def __init__(self, mapped: Mapped) -> None:
        meta = mapped.meta
        self.directory = mapped.directory
        self.rows: int = meta["rows"]
        """Rows that were read."""
        self.dropped: int = meta["dropped"]
        """Rows that were left out."""
        self.tokens: int = meta["tokens"]
        self.loss_tokens: int = meta["loss_tokens"]
        self.digest: str = meta["digest"]
        """SHA-256 over the SHA-256 sums of tokens, mask and offsets: the identity of the training data."""
        self.lengths: npt.NDArray[np.int64] = np.diff(mapped.offsets[_TOKENS])
        self._mapped = mapped

    @classmethod
    def open(cls, directory: Path) -> TokenStore:
        """An existing store; files that do not fit their description are an error."""
        return cls(Mapped.open(directory, _LAYOUT, metrics=("loss_tokens",)))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Sample:
        # Copies: samples outlive the map, and torch wants memory that it may write to.
        tokens_T = np.array(self._mapped.get(_TOKENS, number), np.int32)
        return Sample(tokens_T, np.array(self._mapped.get(_MASK, number), np.bool_))


def cached_store(
    source: str | Sequence[str], encode: Encoder, root: Path, progress: Progress | None = None
) -> TokenStore:
    """The store of a source under `root`, built if it is not there."""
    key = store_key(source_digest(source), encode.tokenizer, encode.settings)
    directory = root / key
    if directory.is_dir():
        return TokenStore.open(directory)
    encode.start()
    return build_store(read_rows(source), encode, directory, key, progress)


def store_key(source: str, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> str:
    """SHA-256 over all that decides which samples come out."""
    identity = {
        "version": FORMAT_VERSION,
        "source": source,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "template": tokenizer.chat_template,
        # Templates write these by name, and plain texts end with one of them.
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "settings": settings,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def build_store(
    rows: Iterable[Row],
    encode: Callable[[Row], Sample | None],
    directory: Path,
    key: str,
    progress: Progress | None = None,
) -> TokenStore:
    """Encode all rows into a directory that appears whole or not at all."""

    def entry(row: Row) -> Entry | None:
        if (sample := encode(row)) is None:
            return None
        metrics = {"loss_tokens": int(sample.mask_T.sum())}
        return Entry({_TOKENS: sample.tokens_T, _MASK: sample.mask_T}, metrics)

    build_mapped(rows, entry, directory, _LAYOUT, {"version": FORMAT_VERSION, "key": key}, progress)
    return TokenStore.open(directory)
