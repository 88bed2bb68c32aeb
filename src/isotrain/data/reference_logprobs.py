"""Log-probs of a store's responses under one model, cached in a file.

I: items asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isotrain.errors import DataError

# Raise it when the same identity gives other numbers than before, or the file another layout.
FORMAT_VERSION = 1

COLUMNS = 2
PAIR, RESPONSE, MISMATCHED = slice(0, 2), slice(0, 1), slice(1, 2)
"""Columns of a pair: chosen, rejected. Of a response: itself, and its prompt with another's response."""
_TYPE = np.dtype("<f4")
_BLOCK = 1 << 18


class ReferenceLogProbs:
    """One row of log-probs for each item, NaN where it is not known yet; processes of a machine share it.

    The file's name is the hash of all that decides its numbers: for another model or other data there is
    another file.
    """

    def __init__(self, path: Path, items: int) -> None:
        try:
            size = path.stat().st_size
            if size != items * COLUMNS * _TYPE.itemsize:
                raise DataError(f"{path}: {size} bytes do not fit {items} items; delete it")
            self._rows = np.memmap(path, _TYPE, mode="r+", shape=(items, COLUMNS))
        except OSError as error:
            raise DataError(f"{path}: cannot be used ({error.strerror or error}); delete it") from error

    def __len__(self) -> int:
        return len(self._rows)

    def known(self) -> npt.NDArray[np.bool_]:
        known: npt.NDArray[np.bool_] = ~np.isnan(self._rows).any(1)
        return known

    def put(self, numbers: Sequence[int], logps_IC: npt.NDArray[np.float32]) -> None:
        assert not np.isnan(logps_IC).any()
        self._rows[list(numbers)] = logps_IC

    def __getitem__(self, numbers: Sequence[int]) -> npt.NDArray[np.float32]:
        logps_IC = np.array(self._rows[list(numbers)], np.float32)
        if np.isnan(logps_IC).any():
            raise DataError(f"{self._rows.filename} lacks log-probs of some items; delete it")
        return logps_IC

    def flush(self) -> None:
        self._rows.flush()


def table_path(root: Path, identity: dict[str, Any]) -> Path:
    """Where the table of an identity is: all that decides which numbers come out."""
    text = json.dumps({"version": FORMAT_VERSION, **identity}, sort_keys=True)
    return root / f"{hashlib.sha256(text.encode()).hexdigest()}.f32"


def make_table(path: Path, items: int) -> None:
    """Make an empty table if there is none; it appears whole or not at all."""
    if path.exists():
        return
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as file:
            for start in range(0, items, _BLOCK):
                rows = min(_BLOCK, items - start)
                file.write(np.full((rows, COLUMNS), np.nan, _TYPE).tobytes())
            file.flush()
            # Written out before it has its name: rows that a crash loses must be read as not known.
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise DataError(
            f"{path.parent}: cannot cache log-probs there ({error.strerror or error}); free disk space, set "
            "ISOTRAIN_CACHE to another directory, or set algorithm.reference=live"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink()
