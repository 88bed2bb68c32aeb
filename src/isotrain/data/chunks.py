"""Encoded rows in chunks, each a file that is whole or not there."""

from __future__ import annotations

import hashlib
import io
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from isotrain.data.rows import Row
from isotrain.data.store import OFFSETS, Codec
from isotrain.errors import DataError

CHUNK_ROWS = 1024
_SUM = 32  # bytes of a SHA-256

T = TypeVar("T")


class RowEncoder(Protocol[T]):
    """Rows to values of one kind; its first row may decide how it reads the others."""

    name: ClassVar[str]
    """Of its kind, by which another process makes the same one."""
    tokenizer: PreTrainedTokenizerBase
    codec: Codec[T]
    arguments: dict[str, Any]
    """What it was made with besides the tokenizer, as JSON can hold it."""

    @property
    def settings(self) -> dict[str, Any]: ...

    def values(self, row: Row) -> Sequence[T]: ...


def chunked(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """Rows in chunks. Those before a row that cannot be read come first: they may have an earlier error."""
    chunk: list[Row] = []
    try:
        for row in rows:
            chunk.append(row)
            if len(chunk) == size:
                yield chunk
                chunk = []
    except DataError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def chunk_path(directory: Path, first: int, rows: Sequence[Row]) -> Path:
    """Of the chunk that begins at row `first`."""
    return directory / f"{first}-{len(rows)}"


def encode_chunk(encoder: RowEncoder[Any], rows: Sequence[Row], path: Path) -> None:
    """Write what rows are encoded to, with its SHA-256 before it."""
    codec = encoder.codec
    found = [encoder.values(row) for row in rows]
    entries = [codec.write(value) for values in found for value in values]
    arrays: dict[str, npt.NDArray[Any]] = {
        "rows": np.array([len(rows), sum(not values for values in found)], np.int64)
    }
    for part in codec.layout:
        for name, kind in part.types.items():
            whole = [np.zeros(0, kind), *(entry[name] for entry in entries)]
            arrays[name] = np.concatenate([values.astype(kind) for values in whole])
            lengths = np.array([len(entry[name]) for entry in entries], OFFSETS)
            assert np.array_equal(arrays.setdefault(part.offsets, lengths), lengths), "equally many elements"
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    data = file.getvalue()
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    partial.write_bytes(hashlib.sha256(data).digest() + data)
    partial.rename(path)


def read_chunk(path: Path) -> bytes | None:
    """What is in a chunk, or None where there is none, or another than was written."""
    with suppress(OSError):
        content = path.read_bytes()
        if hashlib.sha256(content[_SUM:]).digest() == content[:_SUM]:
            return content[_SUM:]
    return None
