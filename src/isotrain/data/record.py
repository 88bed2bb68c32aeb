"""Recorded trajectories as Parquet: written whole or not at all, read back bit for bit.

P: prompt tokens, N: response tokens of a trajectory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isotrain.data.trajectory import Trajectory
from isotrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow

# Rows of a row group: what is in memory at one time, and far below the 2^31 tokens of an Arrow list column.
_GROUP = 1024

_NUMBERS = {"row": "int64", "place": "int64", "sample": "int64", "seed": "int64", "finished": "bool"}
_LISTS: dict[str, type[np.generic]] = {
    "prompt": np.int32,
    "response": np.int32,
    "mask": np.bool_,
    "logp": np.float32,
    "version": np.int32,
}


class Record(NamedTuple):
    trajectory: Trajectory
    reward: float
    advantage: float | None
    """None where each token has its own, or the trajectory was not trained on."""


def write_trajectories(path: Path, records: Iterable[tuple[Trajectory, float, float | None]]) -> None:
    """Write one row per trajectory; `path` is replaced only when all are written."""
    import pyarrow.parquet

    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            # No dictionaries: they are looked up by value, which takes 0.0 and -0.0 for the same.
            with pyarrow.parquet.ParquetWriter(
                file, _schema(), compression="zstd", use_dictionary=False
            ) as writer:
                rest = iter(records)
                while group := list(islice(rest, _GROUP)):
                    writer.write_table(_table(group))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"{path}: trajectories cannot be written ({error.strerror or error}); "
            "make room, or set rollout.record to false"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_trajectories(path: Path) -> list[Record]:
    """All trajectories of a file, in the order in which they were written."""
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open("rb") as stream, pyarrow.parquet.ParquetFile(stream) as file:
            if not file.schema_arrow.equals(_schema()):
                raise DataError(f"{path}: not the columns of recorded trajectories")
            return [record for batch in file.iter_batches(_GROUP) for record in _records(batch, path)]
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as recorded trajectories: {error}") from error


def _schema() -> pyarrow.Schema:
    import pyarrow

    fields = [pyarrow.field(name, pyarrow.type_for_alias(kind), False) for name, kind in _NUMBERS.items()]
    fields.append(pyarrow.field("reward", pyarrow.float64(), nullable=False))
    fields.append(pyarrow.field("advantage", pyarrow.float64()))
    for name, kind in _LISTS.items():
        values = pyarrow.list_(pyarrow.field("element", pyarrow.from_numpy_dtype(kind), nullable=False))
        fields.append(pyarrow.field(name, values, nullable=False))
    return pyarrow.schema(fields)


def _table(records: Sequence[tuple[Trajectory, float, float | None]]) -> pyarrow.Table:
    import pyarrow

    trajectories, rewards, advantages = zip(*records, strict=True)
    schema = _schema()
    columns: dict[str, Any] = {
        name: pyarrow.array([getattr(t, name) for t in trajectories], schema.field(name).type)
        for name in _NUMBERS
    }
    columns["reward"] = pyarrow.array([float(reward) for reward in rewards], pyarrow.float64())
    columns["advantage"] = pyarrow.array(
        [None if a is None else float(a) for a in advantages], pyarrow.float64()
    )
    lists: dict[str, list[npt.NDArray[Any]]] = {
        "prompt": [t.tokens_T[: t.prompt_length] for t in trajectories],
        "response": [t.response_N for t in trajectories],
        "mask": [t.mask_N for t in trajectories],
        "logp": [t.logp_N for t in trajectories],
        "version": [t.version_N for t in trajectories],
    }
    for name, arrays in lists.items():
        bounds = np.cumsum([0, *map(len, arrays)])
        flat = np.concatenate(arrays)
        assert flat.dtype == _LISTS[name], f"{name} is {flat.dtype}"
        columns[name] = pyarrow.ListArray.from_arrays(
            pyarrow.array(bounds, pyarrow.int32()), pyarrow.array(flat), type=schema.field(name).type
        )
    return pyarrow.table(columns, schema=schema)


def _records(batch: pyarrow.RecordBatch, path: Path) -> Iterator[Record]:
    numbers = {name: batch.column(name).to_pylist() for name in (*_NUMBERS, "reward", "advantage")}
    lists = {name: _split(batch.column(name), dtype) for name, dtype in _LISTS.items()}
    for i in range(batch.num_rows):
        prompt_P, response_N = lists["prompt"][i], lists["response"][i]
        if any(len(lists[name][i]) != len(response_N) for name in ("mask", "logp", "version")):
            raise DataError(f"{path}: the lists of row {numbers['row'][i]} have different lengths")
        trajectory = Trajectory(
            **{name: numbers[name][i] for name in _NUMBERS},
            prompt_length=len(prompt_P),
            tokens_T=np.concatenate([prompt_P, response_N]),
            mask_N=lists["mask"][i],
            logp_N=lists["logp"][i],
            version_N=lists["version"][i],
        )
        yield Record(trajectory, numbers["reward"][i], numbers["advantage"][i])


def _split(column: Any, dtype: type[np.generic]) -> list[npt.NDArray[Any]]:
    """Each row's list as an array of its own, so that one that is kept does not keep them all."""
    flat = column.flatten().to_numpy(zero_copy_only=False)
    bounds = np.cumsum(column.value_lengths().to_numpy())
    return [part.astype(dtype) for part in np.split(flat, bounds[:-1])]
