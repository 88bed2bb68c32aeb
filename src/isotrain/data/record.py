"""Recorded trajectories as Parquet: written whole or not at all, read back bit for bit.

P: prompt tokens, N: response tokens of a trajectory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from isotrain.data.parquet_bounds import check_group, check_rows
from isotrain.data.trajectory import EpisodePart, Trajectory, Turn
from isotrain.errors import DataError
from isotrain.files import open_regular, parse_json

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

# Rows and tokens of a row group: what is in memory at one time, far below what its readers refuse.
_GROUP, _GROUP_TOKENS = 1024, 1 << 22

_NUMBERS = {"row": "int64", "prompt_index": "int64", "sample": "int64", "seed": "int64", "finished": "bool"}
_COUNTS = {"route_layers": "int32"}
_RANKS, _OTHERS = b"ranks", b"others"
_MOST_RANKS = 100_000
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LISTS: dict[str, type[np.generic]] = {
    "prompt": np.int32,
    "response": np.int32,
    "mask": np.bool_,
    "logp": np.float32,
    "version": np.int32,
    "routes": np.int16,
}
# Columns that recordings of earlier versions do not have, the newest first.
_LATER = (("pictures",), ("routes", "route_layers"), ("episode",), ("detail",))


class Marks(NamedTuple):
    """The scores of a response."""

    score: float
    """From the reward workers, before reward models on the ranks, length and KL penalties."""
    parts: dict[str, float]
    """Each of their rewards before its weight."""
    failure: str | None
    """Why it could not be scored."""
    source: str
    """The data set that its prompt is from."""
    greedy: float | None
    """Score of the greedy response to the same prompt, where the algorithm compares with it."""
    reward: float
    """After everything: what advantages are computed from."""
    detail: str = ""
    """For a failure, one line about it; a recording of an earlier version has none."""


class Recorded(NamedTuple):
    trajectory: Trajectory
    marks: Marks
    advantage: float | None
    """None where each token has its own, or the trajectory was not trained on."""


def step_file(directory: Path, step: int, rank: int) -> Path:
    return directory / f"step-{step:06d}-rank-{rank:05d}.parquet"


def step_and_rank(name: str) -> tuple[int, int] | None:
    """Step and rank in the name of a step's file; None for any other file, such as one being written."""
    match = re.fullmatch(r"step-([0-9]{6,12})-rank-([0-9]{5,9})\.parquet", name)
    return (int(match[1]), int(match[2])) if match else None


def recording_ranks(metadata: Mapping[bytes, bytes] | None) -> int | None:
    """How many ranks wrote a file of the step, from the metadata of one of them; None if it does not say."""
    text = (metadata or {}).get(_RANKS, b"")
    return int(text) if re.fullmatch(rb"[0-9]{1,6}", text) and 0 < int(text) <= _MOST_RANKS else None


def write_trajectories(
    path: Path, records: Iterable[Recorded], ranks: int = 1, others: Mapping[str, int] | None = None
) -> None:
    """Write one row per trajectory; `path` is replaced only when all are written.

    `ranks` is how many wrote a file of this step: a run that goes on with fewer leaves some behind. `others`
    are counts of the step's responses that are not recorded, as `read_others` gives them back.
    """
    import pyarrow.parquet

    schema = _schema().with_metadata({_RANKS: str(ranks), _OTHERS: json.dumps(dict(others or {}))})
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            # No dictionaries: they are looked up by value, which takes 0.0 and -0.0 for the same.
            with pyarrow.parquet.ParquetWriter(
                file, schema, compression="zstd", use_dictionary=False, write_page_checksum=True
            ) as writer:
                for group in _groups(records):
                    writer.write_table(_table(group, schema))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"{path}: trajectories cannot be written ({error.strerror or error}); "
            "free disk space, or set rollout.record to false"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _groups(records: Iterable[Recorded]) -> Iterator[list[Recorded]]:
    group: list[Recorded] = []
    tokens = 0
    for record in records:
        length = len(record.trajectory.tokens_T)
        if group and (len(group) == _GROUP or tokens + length > _GROUP_TOKENS):
            yield group
            group, tokens = [], 0
        group.append(record)
        tokens += length
    if group:
        yield group


def read_trajectories(path: Path) -> list[Recorded]:
    """All trajectories of a file, in the order in which they were written."""
    return _read(path)[0]


def read_step(directory: Path, step: int) -> list[Recorded]:
    """The trajectories of a step, of however many ranks, in the order of `prompt_index` and sample."""
    records, ranks = _read(step_file(directory, step, 0))
    for rank in range(1, ranks):
        records += _read(step_file(directory, step, rank))[0]
    return sorted(records, key=lambda record: _order(record.trajectory))


def _order(trajectory: Trajectory) -> tuple[int, int, int]:
    part = 0 if trajectory.episode is None else trajectory.episode.part
    return trajectory.prompt_index, trajectory.sample, part


def read_others(directory: Path, step: int) -> dict[str, int]:
    """Counts of a step's responses that are not recorded; none in a recording of an earlier version."""
    path = step_file(directory, step, 0)
    with _opened(path) as (file, _):
        try:
            counts = parse_json((file.schema_arrow.metadata or {}).get(_OTHERS, b"{}"))
        except ValueError:
            counts = None
    if not isinstance(counts, dict) or not all(type(n) is int and n >= 0 for n in counts.values()):
        raise DataError(f"{path} has no counts of unrecorded responses; record it again")
    return counts


def _read(path: Path) -> tuple[list[Recorded], int]:
    with _opened(path) as (file, stream):
        records: list[Recorded] = []
        for group in range(file.metadata.num_row_groups):
            check_group(file, stream, group, file.schema_arrow.names, lists=_LISTS)
            for batch in file.iter_batches(_GROUP, row_groups=[group]):
                records += _records(batch, path)
        return records, _ranks(file.schema_arrow, path)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[pyarrow.parquet.ParquetFile, BinaryIO]]:
    import pyarrow
    import pyarrow.parquet

    known = [whole := _schema()]
    for names in _LATER:
        for name in names:
            whole = whole.remove(whole.get_field_index(name))
        known.append(whole)
    try:
        with (
            open_regular(path) as stream,
            pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True) as file,
        ):
            if not any(map(file.schema_arrow.equals, known)):
                raise DataError(f"{path}: columns of recorded trajectories are missing; record them again")
            check_rows(file)
            yield file, stream
    except DataError as error:
        raise error if str(path) in str(error) else DataError(f"{path}: {error}") from error
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as recorded trajectories: {error}") from error


def _ranks(schema: pyarrow.Schema, path: Path) -> int:
    ranks = recording_ranks(schema.metadata)
    if ranks is None:
        raise DataError(f"{path} does not say how many ranks recorded; record it again")
    return ranks


def _schema() -> pyarrow.Schema:
    import pyarrow

    fields = _required(_NUMBERS | _COUNTS)
    fields.append(pyarrow.field("source", pyarrow.string(), nullable=False))
    fields.append(pyarrow.field("score", pyarrow.float64(), nullable=False))
    part = pyarrow.field("value", pyarrow.float64(), nullable=False)
    fields.append(pyarrow.field("parts", pyarrow.map_(pyarrow.string(), part), nullable=False))
    fields.append(pyarrow.field("failure", pyarrow.string()))
    fields.append(pyarrow.field("greedy", pyarrow.float64()))
    fields.append(pyarrow.field("reward", pyarrow.float64(), nullable=False))
    fields.append(pyarrow.field("detail", pyarrow.string(), nullable=False))
    fields.append(pyarrow.field("advantage", pyarrow.float64()))
    for name, kind in _LISTS.items():
        values = pyarrow.list_(pyarrow.field("element", pyarrow.from_numpy_dtype(kind), nullable=False))
        fields.append(pyarrow.field(name, values, nullable=False))
    digests = pyarrow.list_(pyarrow.field("element", pyarrow.string(), nullable=False))
    fields.append(pyarrow.field("pictures", digests, nullable=False))
    fields.append(pyarrow.field("episode", _episode_type()))
    return pyarrow.schema(fields)


def _episode_type() -> pyarrow.DataType:
    import pyarrow

    turn = {"start": "int32", "end": "int32", "reward": "float64", "calls": "int32", "failures": "int32"}
    turns = pyarrow.list_(pyarrow.struct(_required({**turn, "seconds": "float64"})))
    numbers = _required({"part": "int32", "parts": "int32", "earlier": "float64", "detail": "string"})
    optional = [pyarrow.field("reward", pyarrow.float64()), pyarrow.field("failure", pyarrow.string())]
    return pyarrow.struct([*numbers, *optional, pyarrow.field("turns", turns, nullable=False)])


def _required(kinds: Mapping[str, str]) -> list[pyarrow.Field]:
    import pyarrow

    return [pyarrow.field(name, pyarrow.type_for_alias(kind), False) for name, kind in kinds.items()]


def _table(records: Sequence[Recorded], schema: pyarrow.Schema) -> pyarrow.Table:
    import pyarrow

    trajectories, marks, advantages = zip(*records, strict=True)
    columns: dict[str, Any] = {
        name: pyarrow.array([getattr(t, name) for t in trajectories], schema.field(name).type)
        for name in (*_NUMBERS, *_COUNTS)
    }
    for name in Marks._fields:
        values = [getattr(m, name) for m in marks]
        columns[name] = pyarrow.array(
            [list(parts.items()) for parts in values] if name == "parts" else values, schema.field(name).type
        )
    columns["advantage"] = pyarrow.array(advantages, pyarrow.float64())
    columns["episode"] = pyarrow.array(
        [_episode_values(t.episode) for t in trajectories], schema.field("episode").type
    )
    columns["pictures"] = pyarrow.array([t.pictures for t in trajectories], schema.field("pictures").type)
    lists: dict[str, list[npt.NDArray[Any]]] = {
        "prompt": [t.tokens_T[: t.prompt_length] for t in trajectories],
        "response": [t.response_N for t in trajectories],
        "mask": [t.mask_N for t in trajectories],
        "logp": [t.logp_N for t in trajectories],
        "version": [t.version_N for t in trajectories],
        "routes": [
            np.zeros(0, np.int16) if t.routes_TLK is None else t.routes_TLK.ravel() for t in trajectories
        ],
    }
    for name, arrays in lists.items():
        bounds = np.cumsum([0, *map(len, arrays)])
        flat = np.concatenate(arrays)
        assert flat.dtype == _LISTS[name], f"{name} is {flat.dtype}"
        columns[name] = pyarrow.ListArray.from_arrays(
            pyarrow.array(bounds, pyarrow.int32()), pyarrow.array(flat), type=schema.field(name).type
        )
    return pyarrow.table(columns, schema=schema)


def _episode_values(episode: EpisodePart | None) -> dict[str, Any] | None:
    if episode is None:
        return None
    return {**episode._asdict(), "turns": [turn._asdict() for turn in episode.turns]}


def _episode(values: dict[str, Any] | None, tokens: int) -> EpisodePart | None:
    """Raises ValueError where the turns are not those of a response of so many tokens."""
    if values is None:
        return None
    turns = tuple(Turn(**turn) for turn in values["turns"])
    bounds = [0, *(bound for turn in turns for bound in (turn.start, turn.end)), tokens]
    if bounds != sorted(bounds):
        raise ValueError("has turns outside of its response")
    return EpisodePart(**{**values, "turns": turns})


def _records(batch: pyarrow.RecordBatch, path: Path) -> Iterator[Recorded]:
    known = [name for name in Marks._fields if name in batch.schema.names]
    numbers = {name: batch.column(name).to_pylist() for name in (*_NUMBERS, *known, "advantage")}
    known_lists = {name: dtype for name, dtype in _LISTS.items() if name in batch.schema.names}
    lists = {name: _split(batch.column(name), dtype) for name, dtype in known_lists.items()}
    has_routes = "routes" in known_lists
    layers = batch.column("route_layers").to_pylist() if has_routes else [0] * batch.num_rows
    has_episodes = "episode" in batch.schema.names
    episodes = batch.column("episode").to_pylist() if has_episodes else [None] * batch.num_rows
    sees = "pictures" in batch.schema.names
    pictures = batch.column("pictures").to_pylist() if sees else [()] * batch.num_rows
    for i in range(batch.num_rows):
        prompt_P, response_N = lists["prompt"][i], lists["response"][i]
        if any(len(lists[name][i]) != len(response_N) for name in ("mask", "logp", "version")):
            raise DataError(f"{path}: the lists of row {numbers['row'][i]} have different lengths")
        try:
            episode = _episode(episodes[i], len(response_N))
        except ValueError as error:
            raise DataError(f"{path}: row {numbers['row'][i]} {error}") from error
        if not all(_DIGEST.fullmatch(digest) for digest in pictures[i]):
            raise DataError(f"{path}: row {numbers['row'][i]} has pictures without a digest; record again")
        trajectory = Trajectory(
            **{name: numbers[name][i] for name in _NUMBERS},
            prompt_length=len(prompt_P),
            tokens_T=np.concatenate([prompt_P, response_N]),
            mask_N=lists["mask"][i],
            logp_N=lists["logp"][i],
            version_N=lists["version"][i],
            episode=episode,
            routes_TLK=_routes(lists["routes"][i], len(prompt_P) + len(response_N), layers[i], path)
            if has_routes
            else None,
            pictures=tuple(pictures[i]),
        )
        marks = {name: numbers[name][i] for name in known}
        yield Recorded(trajectory, Marks(**{**marks, "parts": dict(marks["parts"])}), numbers["advantage"][i])


def _routes(
    flat: npt.NDArray[np.int16], tokens: int, layers: int, path: Path
) -> npt.NDArray[np.int16] | None:
    if not len(flat) and not layers:
        return None
    if layers < 1 or not tokens or len(flat) % (tokens * layers):
        raise DataError(f"{path}: {len(flat)} routes are not those of {layers} layers and {tokens} tokens")
    return flat.reshape(tokens, layers, -1)


def _split(column: Any, dtype: type[np.generic]) -> list[npt.NDArray[Any]]:
    """Each row's list as an array of its own, so that one that is kept does not keep them all."""
    flat = column.flatten().to_numpy(zero_copy_only=False)
    bounds = np.cumsum(column.value_lengths().to_numpy())
    return [part.astype(dtype) for part in np.split(flat, bounds[:-1])]
