"""Encoded rows as memory-mapped columns, which all ranks of a machine share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from isotrain.errors import DataError

# Raise it when the same rows and settings give other values than before, or all stores another layout.
FORMAT_VERSION = 1

META = "meta.json"
OFFSETS = "<i8"

T = TypeVar("T")
Columns = Mapping[str, npt.NDArray[Any]]
"""Entries of one value, by file."""


@dataclass(frozen=True)
class Ragged:
    """Files that hold the entries of all values one after the other, and the file of the entries' bounds."""

    count: str
    """Name of the number of elements in the description."""
    types: dict[str, str]
    """Type of each file; all have equally many elements, with the same bounds."""
    offsets: str


@dataclass(frozen=True)
class Codec(Generic[T]):
    """How values of one kind are kept. The first part of the layout is their tokens."""

    version: int
    layout: Sequence[Ragged]
    write: Callable[[T], Columns]
    read: Callable[[Columns], T]
    sums: Mapping[str, str] = field(default_factory=dict)
    """Entries of the description, each the sum of a file."""

    def types(self) -> dict[str, str]:
        """Type of each file, in the order in which the digest counts them."""
        parts = (part.types | {part.offsets: OFFSETS} for part in self.layout)
        return {name: kind for part in parts for name, kind in part.items()}


class SampleStore(Generic[T]):
    """Values by number. Only the pages that are read take memory; the bounds are kept whole."""

    def __init__(self, directory: Path, codec: Codec[T]) -> None:
        """Files that do not fit their description are an error."""
        self.directory, self._codec = directory, codec
        self.columns: dict[str, npt.NDArray[Any]] = {}
        self.offsets: dict[str, npt.NDArray[np.int64]] = {}
        try:
            self.meta: dict[str, Any] = json.loads((directory / META).read_text(encoding="utf-8"))
            self.tokens: int = self.meta["tokens"]
            self.digest: str = self.meta["digest"]
            """SHA-256 over the SHA-256 sums of all files: the identity of the training data."""
            if missing := set(codec.sums) - set(self.meta):
                raise DataError(f"{directory / META}: no {', '.join(sorted(missing))}; delete {directory}")
            for part in codec.layout:
                self._map(part, self.meta[part.count])
        except DataError:
            raise
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(f"{directory}: not a store of samples ({error}); delete it") from error
        self.lengths: npt.NDArray[np.int64] = np.diff(next(iter(self.offsets.values())))
        """Tokens of each value."""

    def _map(self, part: Ragged, count: int) -> None:
        offsets = np.fromfile(self.directory / part.offsets, OFFSETS).astype(np.int64)
        known = next(iter(self.offsets.values()), offsets)
        if (
            len(offsets) != len(known)
            or (self.directory / part.offsets).stat().st_size != offsets.nbytes
            or offsets[0] != 0
            or offsets[-1] != count
            or np.any(np.diff(offsets) < 0)
        ):
            raise DataError(f"{self.directory / part.offsets}: damaged; delete {self.directory}")
        for name, kind in part.types.items():
            file = self.directory / name
            if file.stat().st_size != count * np.dtype(kind).itemsize:
                raise DataError(f"{file}: not of the size in {META}; delete {self.directory}")
            # An empty file cannot be mapped: no value may have an entry of this kind.
            self.columns[name] = np.memmap(file, dtype=kind, mode="r") if count else np.zeros(0, kind)
            self.offsets[name] = offsets

    def __len__(self) -> int:
        return len(self.lengths)

    def entry(self, name: str, number: int) -> npt.NDArray[Any]:
        """Entry of one value in a file, as a view of the map."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self.columns[name][self.offsets[name][number] : self.offsets[name][number + 1]]

    def __getitem__(self, number: int) -> T:
        # Copies: values outlive the map, and torch wants memory that it may write to.
        columns = {name: np.array(self.entry(name, number)) for name in self.columns}
        try:
            return self._codec.read(columns)
        except ValueError as error:
            raise DataError(f"{self.directory}: entry {number} is damaged; delete it") from error


def store_key(source: str, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> str:
    """SHA-256 over all that decides which values come out."""
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
