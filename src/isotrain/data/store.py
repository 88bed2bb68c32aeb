"""A data set tokenised once, as memory-mapped files that every rank shares.

T: tokens of one sample.
N: samples.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from isotrain.data.encode import Encoder
from isotrain.data.rows import Row, read_rows, source_digest
from isotrain.data.sample import Sample
from isotrain.errors import DataError

# Raise it when the same rows and settings give other samples than before, or the files another layout.
FORMAT_VERSION = 1

_META = "meta.json"
_TYPES = {"tokens.bin": "<i4", "mask.bin": "|u1", "offsets.bin": "<i8"}
_REPORT_EVERY = 1000


class TokenStore:
    """Samples by number. Only the pages that are read take memory."""

    def __init__(self, directory: Path, meta: dict[str, Any]) -> None:
        self.directory = directory
        self.rows: int = meta["rows"]
        """Rows that were read."""
        self.dropped: int = meta["dropped"]
        """Rows that were left out."""
        self.tokens: int = meta["tokens"]
        self.loss_tokens: int = meta["loss_tokens"]
        self.digest: str = meta["digest"]
        """SHA-256 over the SHA-256 sums of tokens, mask and offsets: the identity of the training data."""
        self._tokens, self._mask, offsets = (
            np.memmap(directory / name, dtype=kind, mode="r") for name, kind in _TYPES.items()
        )
        self._offsets: npt.NDArray[np.int64] = np.array(offsets, np.int64)
        self.lengths: npt.NDArray[np.int64] = np.diff(self._offsets)

    @classmethod
    def open(cls, directory: Path) -> TokenStore:
        """An existing store; files that do not fit their description are an error."""
        try:
            meta = json.loads((directory / _META).read_text(encoding="utf-8"))
            samples = meta["rows"] - meta["dropped"]
            expected = {"tokens.bin": meta["tokens"], "mask.bin": meta["tokens"], "offsets.bin": samples + 1}
            for name, kind in _TYPES.items():
                if (directory / name).stat().st_size != expected[name] * np.dtype(kind).itemsize:
                    raise DataError(f"{directory / name}: not of the size in {_META}; delete {directory}")
            return cls(directory, meta)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{directory}: not a token store ({error}); delete it") from error

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise IndexError(number)
        part = slice(self._offsets[number], self._offsets[number + 1])
        # Copies: samples outlive the map, and torch wants memory that it may write to.
        return Sample(np.array(self._tokens[part], np.int32), np.array(self._mask[part], np.bool_))


def cached_store(
    source: str | Sequence[str], encode: Encoder, root: Path, progress: Callable[[int], None] | None = None
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
    progress: Callable[[int], None] | None = None,
) -> TokenStore:
    """Encode all rows into a directory that appears whole or not at all.

    Two builders at once do the same work; the first to finish wins and the other takes its result.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        _write(rows, encode, partial, key, progress)
        try:
            partial.rename(directory)
        except OSError:
            if not (directory / _META).is_file():
                raise
    except OSError as error:
        raise DataError(
            f"{directory.parent}: the tokens cannot be kept there ({error.strerror or error}); "
            "make room, or set ISOTRAIN_CACHE to another directory"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return TokenStore.open(directory)


def _write(
    rows: Iterable[Row],
    encode: Callable[[Row], Sample | None],
    directory: Path,
    key: str,
    progress: Callable[[int], None] | None,
) -> None:
    files = {name: (directory / name).open("wb") for name in _TYPES}
    sums = {name: hashlib.sha256() for name in _TYPES}

    def put(name: str, values: npt.NDArray[Any]) -> None:
        data = values.astype(_TYPES[name]).tobytes()
        files[name].write(data)
        sums[name].update(data)

    offsets = array("q", [0])
    count = dropped = loss_tokens = 0
    try:
        for count, row in enumerate(rows, start=1):
            sample = encode(row)
            if sample is None:
                dropped += 1
            else:
                put("tokens.bin", sample.tokens_T)
                put("mask.bin", sample.mask_T)
                offsets.append(offsets[-1] + len(sample))
                loss_tokens += int(sample.mask_T.sum())
            if progress is not None and count % _REPORT_EVERY == 0:
                progress(count)
        if count == dropped:
            raise DataError(f"no samples: {count} rows were read and {dropped} left out; see data.too_long")
        put("offsets.bin", np.frombuffer(offsets, np.int64))
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()
    if progress is not None:
        progress(count)
    meta = {
        "version": FORMAT_VERSION,
        "key": key,
        "rows": count,
        "dropped": dropped,
        "tokens": offsets[-1],
        "loss_tokens": loss_tokens,
        "digest": hashlib.sha256(b"".join(sums[name].digest() for name in _TYPES)).hexdigest(),
    }
    with (directory / _META).open("w", encoding="utf-8") as description:
        description.write(json.dumps(meta, indent=2) + "\n")
        description.flush()
        os.fsync(description.fileno())
