"""Directories of memory-mapped arrays that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from isotrain.errors import DataError

_META = "meta.json"
_OFFSETS = "<i8"
_REPORT_EVERY = 1000

Progress = Callable[[int], None]
Source = TypeVar("Source")
"""What an entry is made from: a row, or a part of one."""


@dataclass(frozen=True)
class Ragged:
    """Files that hold the entries of all rows one after the other, and the file of the entries' bounds."""

    count: str
    """What the description calls the number of values."""
    types: Mapping[str, str]
    """Type of each file; all have equally many values, with the same bounds."""
    offsets: str

    def all_types(self) -> dict[str, str]:
        return {**self.types, self.offsets: _OFFSETS}


Layout = Sequence[Ragged]


@dataclass(frozen=True)
class Entry:
    """What one row puts into each file."""

    values: Mapping[str, npt.NDArray[Any]]
    metrics: Mapping[str, int] = field(default_factory=dict)
    """Numbers whose sums over all rows go into the description."""


class Mapped:
    """The arrays of a directory. Only the pages that are read take memory; the bounds are kept whole."""

    def __init__(self, directory: Path, meta: dict[str, Any], layout: Layout) -> None:
        self.directory = directory
        self.meta = meta
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.offsets: dict[str, npt.NDArray[np.int64]] = {}
        for part in layout:
            offsets = np.array(np.memmap(directory / part.offsets, dtype=_OFFSETS, mode="r"), np.int64)
            if offsets[0] != 0 or offsets[-1] != meta[part.count] or np.any(np.diff(offsets) < 0):
                raise DataError(f"{directory / part.offsets}: damaged; delete {directory}")
            for name, kind in part.types.items():
                # An empty file cannot be mapped: no row may have a value of this kind.
                empty = meta[part.count] == 0
                self.arrays[name] = (
                    np.zeros(0, kind) if empty else np.memmap(directory / name, dtype=kind, mode="r")
                )
                self.offsets[name] = offsets

    @classmethod
    def open(cls, directory: Path, layout: Layout, metrics: Sequence[str] = ()) -> Mapped:
        """An existing directory; files that do not fit their description are an error."""
        try:
            meta = json.loads((directory / _META).read_text(encoding="utf-8"))
            kept = meta["rows"] - meta["dropped"]
            if missing := {"digest", *metrics} - set(meta):
                raise DataError(f"{directory / _META}: no {', '.join(sorted(missing))}; delete {directory}")
            for part in layout:
                for name, kind in part.all_types().items():
                    count = kept + 1 if name == part.offsets else meta[part.count]
                    if (directory / name).stat().st_size != count * np.dtype(kind).itemsize:
                        raise DataError(f"{directory / name}: not of the size in {_META}; delete {directory}")
            return cls(directory, meta, layout)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{directory}: not a token store ({error}); delete it") from error

    def get(self, name: str, number: int) -> npt.NDArray[Any]:
        """What one row put into a file, as a view of the map."""
        offsets = self.offsets[name]
        if not 0 <= number < len(offsets) - 1:
            raise IndexError(number)
        return self.arrays[name][offsets[number] : offsets[number + 1]]


def build_mapped(
    rows: Iterable[Source],
    encode: Callable[[Source], Entry | None],
    directory: Path,
    layout: Layout,
    description: Mapping[str, Any],
    progress: Progress | None = None,
) -> None:
    """Encode all rows into a directory that appears whole or not at all.

    Two builders at once do the same work; the first to finish wins and the other takes its result.
    """
    partial = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.partial")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        _write(rows, encode, partial, layout, description, progress)
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


def _write(
    rows: Iterable[Source],
    encode: Callable[[Source], Entry | None],
    directory: Path,
    layout: Layout,
    description: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    types = {name: kind for part in layout for name, kind in part.all_types().items()}
    files = {name: (directory / name).open("wb") for name in types}
    sums = {name: hashlib.sha256() for name in types}

    def put(name: str, values: npt.NDArray[Any]) -> None:
        data = values.astype(types[name]).tobytes()
        files[name].write(data)
        sums[name].update(data)

    offsets = {part.offsets: array("q", [0]) for part in layout}
    metrics: Counter[str] = Counter()
    count = dropped = 0
    try:
        for count, row in enumerate(rows, start=1):
            entry = encode(row)
            if entry is None:
                dropped += 1
            else:
                for part in layout:
                    lengths = {len(entry.values[name]) for name in part.types}
                    assert len(lengths) == 1, "one row has equally many values in all files of a part"
                    bounds = offsets[part.offsets]
                    bounds.append(bounds[-1] + lengths.pop())
                for name, values in entry.values.items():
                    put(name, values)
                metrics.update(entry.metrics)
            if progress is not None and count % _REPORT_EVERY == 0:
                progress(count)
        if count == dropped:
            raise DataError(f"no samples: {count} rows were read and {dropped} left out; see data.too_long")
        for name, bounds in offsets.items():
            put(name, np.frombuffer(bounds, np.int64))
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()
    if progress is not None:
        progress(count)
    meta = {
        **description,
        "rows": count,
        "dropped": dropped,
        **{part.count: offsets[part.offsets][-1] for part in layout},
        **metrics,
        "digest": hashlib.sha256(b"".join(sums[name].digest() for name in types)).hexdigest(),
    }
    with (directory / _META).open("w", encoding="utf-8") as text:
        text.write(json.dumps(meta, indent=2) + "\n")
        text.flush()
        os.fsync(text.fileno())
