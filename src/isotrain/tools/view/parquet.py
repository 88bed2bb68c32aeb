"""Recorded trajectories from their Parquet files, only the columns and rows that are asked for.

The files may be of a later or earlier isotrain: columns that are not known here are ignored, and of the known
ones only few must be there. Nothing is read whole: batches of rows of the columns that matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from isotrain.data.parquet_bounds import check_group, check_rows
from isotrain.data.record import recording_ranks
from isotrain.errors import DataError
from isotrain.files import open_regular
from isotrain.terminal import visible

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

Column = npt.NDArray[Any]

REQUIRED = ("prompt_index", "sample", "reward", "response")
# What stands for a value that is not there; -1 also where a list is empty.
_NUMBERS: dict[str, tuple[type[np.generic], float]] = {
    "row": (np.int64, -1),
    "prompt_index": (np.int64, -1),
    "sample": (np.int64, -1),
    "finished": (np.int8, -1),
    "score": (np.float64, np.nan),
    "reward": (np.float64, np.nan),
    "advantage": (np.float64, np.nan),
}
TEXTS = ("source", "failure")
_SCALARS = (*_NUMBERS, *TEXTS, "seed", "greedy", "parts", "detail", "episode")
_LISTS: dict[str, type[np.generic]] = {
    "prompt": np.int64,
    "response": np.int64,
    "mask": np.bool_,
    "logp": np.float64,
    "version": np.int64,
}
_ROWS, _BUFFER = 256, 1 << 18


@contextmanager
def _opened(path: Path) -> Iterator[tuple[pyarrow.parquet.ParquetFile, BinaryIO]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with (
            open_regular(path) as stream,
            pyarrow.parquet.ParquetFile(stream, buffer_size=_BUFFER, pre_buffer=False) as file,
        ):
            check_rows(file)
            if missing := [name for name in REQUIRED if name not in file.schema_arrow.names]:
                raise DataError(f"it has no column {missing[0]!r}")
            yield file, stream
    except DataError as error:
        raise DataError(f"{path.name} cannot be read as recorded trajectories: {error}") from error
    # Anybody may have written the file: its types and lengths need not fit together.
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, pyarrow.ArrowException) as error:
        raise DataError(f"{path.name} cannot be read as recorded trajectories: {error}") from error


def read_index(path: Path) -> tuple[dict[str, Column], dict[str, list[str | None]], int | None]:
    """Columns of the table: numbers and texts of each row, and how many ranks recorded the step.

    Of token lists only their lengths and extremes are kept.
    """
    numbers: dict[str, list[Column]] = {}
    texts: dict[str, list[str | None]] = {name: [] for name in TEXTS}
    with _opened(path) as (file, stream):
        names = set(file.schema_arrow.names)
        lengths = "mask" if "mask" in names else "response"  # a bit for each token instead of four bytes
        columns = [name for name in (*_NUMBERS, *TEXTS, lengths, "version", "prompt") if name in names]
        columns.append("episode.part")  # of runs with agents; elsewhere it selects nothing
        for batch in _batches(file, stream, range(file.metadata.num_row_groups), _ROWS, columns):
            for name, column in _of_batch(batch, lengths).items():
                numbers.setdefault(name, []).append(column)
            for name, kept in texts.items():
                known = name in batch.schema.names
                kept += map(_text, batch.column(name).to_pylist()) if known else [None] * batch.num_rows
        ranks = recording_ranks(file.schema_arrow.metadata)
    return {name: np.concatenate(parts) for name, parts in numbers.items()}, texts, ranks


def _batches(
    file: pyarrow.parquet.ParquetFile,
    stream: BinaryIO,
    groups: Iterable[int],
    rows: int,
    columns: Sequence[str],
) -> Iterator[pyarrow.RecordBatch]:
    """One row group after the other, each only if it fits into memory when it is decoded."""
    for group in groups:
        check_group(file, stream, group, columns, lists=_LISTS)
        yield from file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)


def _of_batch(batch: pyarrow.RecordBatch, lengths: str) -> dict[str, Column]:
    names, rows = batch.schema.names, batch.num_rows
    columns: dict[str, Column] = {}
    for name, (dtype, absent) in _NUMBERS.items():
        if name not in names:
            columns[name] = np.full(rows, absent, dtype)
        elif batch.column(name).null_count:
            values = batch.column(name).to_pylist()
            columns[name] = np.array([absent if value is None else value for value in values], dtype)
        else:
            columns[name] = batch.column(name).to_numpy(zero_copy_only=False).astype(dtype)
    size = columns["length"] = columns["trained"] = _lengths(batch, lengths)
    if lengths == "mask":
        columns["trained"] = np.zeros(rows, np.int32)
        if (some := size > 0).any():
            starts = (np.cumsum(size) - size)[some]
            columns["trained"][some] = np.add.reduceat(_flat(batch, "mask"), starts, dtype=np.int32)
    prompts = "prompt" in names
    columns["prompt_length"] = _lengths(batch, "prompt") if prompts else np.full(rows, -1, np.int32)
    columns["part"] = np.zeros(rows, np.int32)
    if "episode" in names:
        columns["part"] = batch.column("episode").field(0).fill_null(0).to_numpy(zero_copy_only=False)
    columns["version"], columns["newest"] = np.full(rows, -1, np.int32), np.full(rows, -1, np.int32)
    if "version" in names:
        size = _lengths(batch, "version")
        some = size > 0
        if some.any():
            flat, starts = _flat(batch, "version"), (np.cumsum(size) - size)[some]
            columns["version"][some] = np.minimum.reduceat(flat, starts)
            columns["newest"][some] = np.maximum.reduceat(flat, starts)
    return columns


def _flat(batch: pyarrow.RecordBatch, name: str) -> Column:
    flat: Column = batch.column(name).flatten().to_numpy(zero_copy_only=False)
    return flat


def _lengths(batch: pyarrow.RecordBatch, name: str) -> Column:
    lengths: Column = batch.column(name).value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int32)


def _text(value: object) -> str | None:
    return None if value is None else visible(str(value)[:200], one_line=True)


def read_rows(path: Path, numbers: Sequence[int], columns: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Some rows of a file, by their numbers in it; lists of tokens as arrays.

    A row group is decoded only up to the last row that is asked for.
    """
    chosen: dict[int, dict[str, Any]] = {}
    with _opened(path) as (file, stream):
        present = [name for name in columns if name in file.schema_arrow.names]
        first = 0
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            inside = sorted(number - first for number in numbers if first <= number < first + rows)
            at = 0
            if inside:
                for batch in _batches(file, stream, [group], 32, present):
                    for i in inside:
                        if at <= i < at + batch.num_rows:
                            chosen[first + i] = _row(batch, i - at)
                    at += batch.num_rows
                    if at > inside[-1]:
                        break
            first += rows
    if missing := [number for number in numbers if number not in chosen]:
        raise DataError(f"{path.name} has no row {missing[0]}: it was written again; reload the page")
    return chosen


def read_row(path: Path, number: int) -> dict[str, Any]:
    """Everything that is known of one row; what the file does not have is None, or an empty list."""
    row = read_rows(path, [number], [*_SCALARS, *_LISTS])[number]
    whole: dict[str, Any] = {name: row.get(name) for name in _SCALARS}
    for name, dtype in _LISTS.items():
        whole[name] = row[name] if row.get(name) is not None else np.zeros(0, dtype)
    return whole


def _row(batch: pyarrow.RecordBatch, i: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in batch.schema.names:
        value = batch.column(name)[i]
        if name in _LISTS:
            flat = None if value.values is None else value.values.to_numpy(zero_copy_only=False)
            row[name] = np.zeros(0, _LISTS[name]) if flat is None else flat.astype(_LISTS[name])
        else:
            row[name] = value.as_py()
    return row
