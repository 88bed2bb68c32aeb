from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from isotrain.data import record as module
from isotrain.data.record import (
    Marks,
    Recorded,
    read_others,
    read_step,
    read_trajectories,
    step_file,
    write_trajectories,
)
from isotrain.data.trajectory import EpisodePart, Trajectory, Turn
from isotrain.errors import DataError


def trajectory(number: int, prompt: int = 3, response: int = 4) -> Trajectory:
    draw = np.random.default_rng(number)
    # Any bits at all: also negative zeros, infinities and NaNs with a payload.
    logp_N = draw.integers(0, 2**32, response, dtype=np.uint32).view(np.float32)
    logp_N[:4] = np.array([0.0, -0.0, -math.inf, math.nan], np.float32)[:response]
    return Trajectory(
        row=number,
        prompt_index=2**40 + number,
        sample=number % 8,
        seed=2**31 - 1 - number,
        prompt_length=prompt,
        tokens_T=draw.integers(0, 2**31 - 1, prompt + response).astype(np.int32),
        mask_N=draw.random(response) < 0.5,
        logp_N=logp_N,
        version_N=draw.integers(0, 9, response).astype(np.int32),
        finished=number % 2 == 0,
        episode=episode(number, response) if number % 3 == 1 else None,
        pictures=("ab" * 32, "0c" * 32)[: number % 4],
    )


def episode(number: int, response: int) -> EpisodePart:
    turns = (Turn(0, response // 2, -0.0, 1, 0, 0.125), Turn(response // 2, response, 1 / 3, 0, 0, 1e-9))
    failed = number % 2 == 0
    return EpisodePart(
        part=number % 2,
        parts=2,
        turns=turns[: number % 3 + 1],
        earlier=number / 7,
        reward=None if failed else number / 5,
        failure="timeout" if failed else None,
        detail="no reply" if failed else "",
    )


def marks(number: int = 0, reward: float = 0.5) -> Marks:
    return Marks(
        score=-0.0 if number % 4 == 1 else number / 3,
        parts=dict([("form", -0.0), ("function", number / 7)][: number % 3]),
        failure="timeout" if number % 5 == 2 else None,
        source=f"data-{number % 2}",
        greedy=None if number % 2 else number / 11,
        reward=reward,
        detail="no result after 10 s" if number % 5 == 2 else "",
    )


def assert_same(a: Trajectory, b: Trajectory) -> None:
    assert repr(a.episode) == repr(b.episode) and a.pictures == b.pictures
    for name in ("row", "prompt_index", "sample", "seed", "prompt_length", "finished"):
        assert getattr(a, name) == getattr(b, name) and type(getattr(b, name)) is type(getattr(a, name))
    for name in ("tokens_T", "mask_N", "logp_N", "version_N"):
        assert getattr(a, name).dtype == getattr(b, name).dtype
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name


def test_they_come_back_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GROUP", 7)
    written = [
        Recorded(trajectory(i, response=i % 9), marks(i, reward=i / 3), None if i % 3 == 0 else -i / 7)
        for i in range(40)
    ]
    write_trajectories(tmp_path / "steps" / "1.parquet", iter(written))
    read = read_trajectories(tmp_path / "steps" / "1.parquet")
    assert len(read) == 40
    for a, b in zip(written, read, strict=True):
        # As text, because 0.0 == -0.0.
        assert repr((a.marks, a.advantage)) == repr((b.marks, b.advantage))
        assert_same(a.trajectory, b.trajectory)
    assert [entry.name for entry in (tmp_path / "steps").iterdir()] == ["1.parquet"]


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        write_trajectories(tmp_path / name, [Recorded(trajectory(i), marks(i), 1.0) for i in range(9)])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("records", [[], [Recorded(trajectory(0, response=0), marks(), None)]])
def test_none_and_empty_ones(tmp_path: Path, records: list[Recorded]) -> None:
    write_trajectories(tmp_path / "a.parquet", records)
    read = read_trajectories(tmp_path / "a.parquet")
    assert len(read) == len(records)
    for (a, _, _), b in zip(records, read, strict=True):
        assert_same(a, b.trajectory)


def test_columns_are_plain(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "a.parquet", [Recorded(trajectory(1, prompt=2, response=2), marks(), None)])
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    kinds = {name: str(table.schema.field(name).type) for name in table.column_names}
    assert kinds == {
        **dict.fromkeys(("row", "prompt_index", "sample", "seed"), "int64"),
        "finished": "bool",
        "route_layers": "int32",
        "routes": "list<element: int16 not null>",
        "pictures": "list<element: string not null>",
        **dict.fromkeys(("score", "greedy", "reward", "advantage"), "double"),
        **dict.fromkeys(("source", "failure", "detail"), "string"),
        "parts": "map<string, double ('parts')>",
        **dict.fromkeys(("prompt", "response", "version"), "list<element: int32 not null>"),
        "mask": "list<element: bool not null>",
        "logp": "list<element: float not null>",
        "episode": (
            "struct<part: int32 not null, parts: int32 not null, earlier: double not null, "
            "detail: string not null, reward: double, failure: string, turns: list<element: "
            "struct<start: int32 not null, end: int32 not null, reward: double not null, "
            "calls: int32 not null, failures: int32 not null, seconds: double not null>> not null>"
        ),
    }
    (values,) = table.to_pylist()
    assert values["prompt"] + values["response"] == trajectory(1, 2, 2).tokens_T.tolist()


def test_recordings_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = step_file(tmp_path, 1, 0)
    write_trajectories(path, [Recorded(trajectory(i), marks(i), None) for i in range(3)])
    table = pyarrow.parquet.read_table(path)
    routes = ["routes", "route_layers"]
    old = ["pictures", *routes]
    for gone in (["pictures"], old, [*old, "episode"], [*old, "episode", "detail"]):
        earlier = table.drop_columns(gone).replace_schema_metadata({"ranks": "1"})
        pyarrow.parquet.write_table(earlier, path)
        read = read_step(tmp_path, 1)
        wanted = [marks(i)._replace(detail="") if "detail" in gone else marks(i) for i in range(3)]
        assert repr([record.marks for record in read]) == repr(wanted)
        if "episode" in gone:
            assert all(record.trajectory.episode is None for record in read)
        assert all(record.trajectory.routes_TLK is None for record in read)
        assert not any(record.trajectory.pictures for record in read)
        assert read_others(tmp_path, 1) == {}


def test_digests_of_pictures_are_checked(tmp_path: Path) -> None:
    record = Recorded(replace(trajectory(2), pictures=("../" * 20,)), marks(), None)
    write_trajectories(tmp_path / "a.parquet", [record])
    with pytest.raises(DataError, match="row 2 has pictures without a digest"):
        read_trajectories(tmp_path / "a.parquet")


@pytest.mark.parametrize("turn", [(0, 5), (-1, 2), (3, 2)])
def test_turns_outside_of_their_response_are_refused(tmp_path: Path, turn: tuple[int, int]) -> None:
    wrong = EpisodePart(0, 1, (Turn(*turn, 0.0, 0, 0, 0.0),))
    record = Recorded(replace(trajectory(2), episode=wrong), marks(), None)
    write_trajectories(tmp_path / "a.parquet", [record])
    with pytest.raises(DataError, match="row 2 has turns outside of its response"):
        read_trajectories(tmp_path / "a.parquet")


def test_sequences_of_an_episode_come_in_order(tmp_path: Path) -> None:
    parts = [replace(trajectory(0), sample=1, episode=EpisodePart(part, 2, ())) for part in (1, 0)]
    first = replace(trajectory(0), sample=0)
    path = step_file(tmp_path, 1, 0)
    write_trajectories(path, [Recorded(t, marks(), None) for t in (*parts, first)])
    read = [record.trajectory for record in read_step(tmp_path, 1)]
    assert [(t.sample, t.episode and t.episode.part) for t in read] == [(0, None), (1, 0), (1, 1)]


def test_counts_of_other_responses(tmp_path: Path) -> None:
    path = step_file(tmp_path, 1, 0)
    for others in ({}, {"responses": 12, "timeout": 3}):
        write_trajectories(path, [Recorded(trajectory(1), marks(), None)], others=others)
        assert read_others(tmp_path, 1) == others
    table = pyarrow.parquet.read_table(path)
    for damage in ("{", "[]", '{"responses": "3"}', '{"responses": -1}', '{"responses": true}'):
        metadata = {"ranks": "1", "others": damage}
        pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)
        with pytest.raises(DataError, match="no counts of unrecorded responses"):
            read_others(tmp_path, 1)


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def failing() -> Iterator[Recorded]:
        yield Recorded(trajectory(2), marks(), None)
        raise RuntimeError("a rank is gone")

    path = tmp_path / "a.parquet"
    write_trajectories(path, [Recorded(trajectory(1), marks(), None)])
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        write_trajectories(path, failing())
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(DataError, match=r"trajectories cannot be written.*rollout\.record"):
        write_trajectories(path / "below-a-file.parquet", [])


def test_a_step_of_several_ranks(tmp_path: Path) -> None:
    """In the order of draws and samples; what a rank wrote that is no more does not count."""
    order = [7, 2, 5, 0, 3, 1, 6, 4]
    for rank in range(2):
        own = [Recorded(trajectory(number), marks(number), None) for number in order[rank::2]]
        write_trajectories(step_file(tmp_path, 3, rank), own, ranks=2)
    shutil.copy(step_file(tmp_path, 3, 0), step_file(tmp_path, 3, 2))
    assert [record.trajectory.row for record in read_step(tmp_path, 3)] == list(range(8))
    step_file(tmp_path, 3, 1).unlink()
    with pytest.raises(DataError, match=r"step-000003-rank-00001\.parquet: cannot be read"):
        read_step(tmp_path, 3)


@pytest.mark.parametrize("ranks", ["", "0", "-1", "many", "9" * 40])
def test_a_number_of_ranks_that_is_none(tmp_path: Path, ranks: str) -> None:
    file = step_file(tmp_path, 1, 0)
    write_trajectories(file, [Recorded(trajectory(0), marks(), None)])
    table = pyarrow.parquet.read_table(file)
    pyarrow.parquet.write_table(table.replace_schema_metadata({"ranks": ranks}), file)
    with pytest.raises(DataError, match="does not say how many ranks"):
        read_step(tmp_path, 1)


def test_a_turned_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_trajectories(path, [Recorded(trajectory(i, response=50), marks(), 0.1) for i in range(20)])
    data = path.read_bytes()
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    bodies = [i for i in range(4, end) if i % 97 == 0]
    for place in bodies:
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        # Headers of pages have no checksum, but nothing that a run would learn from.
        with suppress(DataError):
            for a, b in zip(read_trajectories(path), range(20), strict=True):
                assert_same(trajectory(b, response=50), a.trajectory)
                assert a.marks == marks() and a.advantage == 0.1


@pytest.mark.parametrize("damage", ["missing", "text", "cut", "flipped", "columns", "lengths", "nulls"])
def test_files_that_are_not_recordings(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.parquet"
    write_trajectories(path, [Recorded(trajectory(i, response=50), marks(), 0.1) for i in range(20)])
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
