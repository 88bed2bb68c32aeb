from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from isotrain.data import record as module
from isotrain.data.record import Record, read_trajectories, write_trajectories
from isotrain.data.trajectory import Trajectory
from isotrain.errors import DataError


def trajectory(number: int, prompt: int = 3, response: int = 4) -> Trajectory:
    draw = np.random.default_rng(number)
    # Any bits at all: also negative zeros, infinities and NaNs with a payload.
    logp_N = draw.integers(0, 2**32, response, dtype=np.uint32).view(np.float32)
    logp_N[:4] = np.array([0.0, -0.0, -math.inf, math.nan], np.float32)[:response]
    return Trajectory(
        row=number,
        place=2**40 + number,
        sample=number % 8,
        seed=2**31 - 1 - number,
        prompt_length=prompt,
        tokens_T=draw.integers(0, 2**31 - 1, prompt + response).astype(np.int32),
        mask_N=draw.random(response) < 0.5,
        logp_N=logp_N,
        version_N=draw.integers(0, 9, response).astype(np.int32),
        finished=number % 2 == 0,
    )


def assert_same(a: Trajectory, b: Trajectory) -> None:
    for name in ("row", "place", "sample", "seed", "prompt_length", "finished"):
        assert getattr(a, name) == getattr(b, name) and type(getattr(b, name)) is type(getattr(a, name))
    for name in ("tokens_T", "mask_N", "logp_N", "version_N"):
        assert getattr(a, name).dtype == getattr(b, name).dtype
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name


def test_they_come_back_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GROUP", 7)
    written = [
        Record(trajectory(i, response=i % 9), reward=i / 3, advantage=None if i % 3 == 0 else -i / 7)
        for i in range(40)
    ]
    write_trajectories(tmp_path / "steps" / "1.parquet", iter(written))
    read = read_trajectories(tmp_path / "steps" / "1.parquet")
    assert len(read) == 40
    for a, b in zip(written, read, strict=True):
        assert (a.reward, a.advantage) == (b.reward, b.advantage)
        assert_same(a.trajectory, b.trajectory)
    assert [entry.name for entry in (tmp_path / "steps").iterdir()] == ["1.parquet"]


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        write_trajectories(tmp_path / name, [(trajectory(i), 0.5, 1.0) for i in range(9)])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("records", [[], [(trajectory(0, response=0), 0.0, None)]])
def test_none_and_empty_ones(tmp_path: Path, records: list[tuple[Trajectory, float, None]]) -> None:
    write_trajectories(tmp_path / "a.parquet", records)
    read = read_trajectories(tmp_path / "a.parquet")
    assert len(read) == len(records)
    for (a, _, _), b in zip(records, read, strict=True):
        assert_same(a, b.trajectory)


def test_columns_are_plain(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "a.parquet", [(trajectory(1, prompt=2, response=2), 0.5, None)])
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    kinds = {name: str(table.schema.field(name).type) for name in table.column_names}
    assert kinds == {
        **dict.fromkeys(("row", "place", "sample", "seed"), "int64"),
        "finished": "bool",
        **dict.fromkeys(("reward", "advantage"), "double"),
        **dict.fromkeys(("prompt", "response", "version"), "list<element: int32 not null>"),
        "mask": "list<element: bool not null>",
        "logp": "list<element: float not null>",
    }
    (values,) = table.to_pylist()
    assert values["prompt"] + values["response"] == trajectory(1, 2, 2).tokens_T.tolist()


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def failing() -> Iterator[Record]:
        yield Record(trajectory(2), 0.0, None)
        raise RuntimeError("a rank is gone")

    path = tmp_path / "a.parquet"
    write_trajectories(path, [(trajectory(1), 1.0, None)])
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        write_trajectories(path, failing())
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(DataError, match=r"trajectories cannot be written.*rollout\.record"):
        write_trajectories(path / "below-a-file.parquet", [])


@pytest.mark.parametrize("damage", ["missing", "text", "cut", "flipped", "columns", "lengths", "nulls"])
def test_files_that_are_not_recordings(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.parquet"
    write_trajectories(path, [(trajectory(i, response=50), 0.5, 0.1) for i in range(20)])
    data, table = path.read_bytes(), pyarrow.parquet.read_table(path)
    if damage == "missing":
        path.unlink()
    elif damage == "text":
        path.write_text("{}")
    elif damage == "cut":
        path.write_bytes(data[:-100])
    elif damage == "flipped":
        path.write_bytes(data[:-60] + bytes(b ^ 0xFF for b in data[-60:-8]) + data[-8:])
    elif damage == "columns":
        pyarrow.parquet.write_table(table.drop_columns(["logp"]), path)
    elif damage == "lengths":
        short = pyarrow.array([[0]] * 20, table.schema.field("version").type)
        at = table.schema.get_field_index("version")
        pyarrow.parquet.write_table(table.set_column(at, table.schema.field("version"), short), path)
    else:
        at = table.schema.get_field_index("mask")
        nulls = pyarrow.nulls(20, pyarrow.list_(pyarrow.bool_()))
        pyarrow.parquet.write_table(table.set_column(at, "mask", nulls), path)
    with pytest.raises(DataError, match=r"a\.parquet: "):
        read_trajectories(path)
