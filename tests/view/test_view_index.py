"""The table of trajectories: rows of all ranks, sorted, filtered, paged; files that come, change and go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from view_runs import make_run, response

from isotrain.data.record import step_file, write_trajectories
from isotrain.errors import DataError
from isotrain.view.trajectories import Condition, TrajectoryIndex


def index_of(run: Path) -> TrajectoryIndex:
    index = TrajectoryIndex(run / "trajectories")
    index.refresh()
    return index


def rows(index: TrajectoryIndex, *conditions: Condition, sort: str = "step", down: bool = True) -> list[Any]:
    found: list[Any] = index.page(conditions, sort, down, 0, 100)["rows"]
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(
        tmp_path / "run",
        "nowhere",
        step_1=[
            response([1, 2, 3, 4], prompt_index=0, sample=0, reward=1.0, mask=[True, False, False, True]),
            response([1, 2], prompt_index=0, sample=1, reward=0.0, version=[2, 5], finished=False),
            response([], prompt_index=1, sample=0, reward=-1.0, failure="timeout", source="math"),
        ],
        step_1_rank_1=[response([9] * 7, prompt_index=1, sample=1, reward=0.5, advantage=None)],
        step_2=[response([1], prompt_index=2, sample=0, reward=float("nan"))],
    )


def test_what_is_known_of_a_row(run: Path) -> None:
    found = rows(index_of(run), Condition("step", "eq", "1"))
    assert len(found) == 4
    first, second, empty, other = found
    assert first["length"] == 4 and first["trained"] == 2 and first["prompt_length"] == 3
    assert (second["version"], second["newest"], second["finished"]) == (2, 5, 0)
    assert empty["length"] == 0 and empty["version"] == -1 and empty["failure"] == "timeout"
    assert (other["rank"], other["index"], other["advantage"]) == (1, 0, "nan")


@pytest.mark.parametrize("down", [True, False])
def test_sorting_puts_what_is_not_known_last(run: Path, down: bool) -> None:
    rewards = [row["reward"] for row in rows(index_of(run), sort="reward", down=down)]
    assert rewards[-1] == "nan"
    assert rewards[:-1] == sorted(rewards[:-1], reverse=down)


def test_sorting_by_a_text(run: Path) -> None:
    assert [row["source"] for row in rows(index_of(run), sort="source")] == ["math", *["data"] * 4]
    assert rows(index_of(run), sort="failure")[0]["failure"] == "timeout"


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        (Condition("reward", "lt", "0.5"), 2),
        (Condition("reward", "ge", "0.5"), 2),
        (Condition("finished", "eq", "0"), 1),
        (Condition("failure", "ne", ""), 1),
        (Condition("failure", "eq", ""), 4),
        (Condition("failure", "has", "TIME"), 1),
        (Condition("failure", "has", ""), 1),
        (Condition("source", "eq", "math"), 1),
        (Condition("source", "eq", "other"), 0),
        (Condition("version", "ne", "3"), 2),
        (Condition("row", "eq", "101"), 2),
    ],
)
def test_conditions(run: Path, condition: Condition, found: int) -> None:
    assert len(rows(index_of(run), condition)) == found


def test_pages_hold_each_row_once(run: Path) -> None:
    index = index_of(run)
    pages = [index.page([], "finished", True, offset, 2) for offset in (0, 2, 4, 6)]
    seen = [(row["step"], row["rank"], row["index"]) for page in pages for row in page["rows"]]
    assert len(seen) == len(set(seen)) == 5 and pages[0]["found"] == 5


def test_a_group_over_two_ranks(run: Path) -> None:
    group = index_of(run).group(1, 1, 10)
    assert [(row["sample"], row["rank"]) for row in group] == [(0, 0), (1, 1)]


def test_new_replaced_and_removed_files(run: Path) -> None:
    index = index_of(run)
    before = index.revision
    index.refresh()
    assert index.revision == before, "nothing is new"
    (run / "trajectories" / ".step-000003-rank-00000.parquet.ab.partial").write_bytes(b"half")
    (run / "trajectories" / "recorded.json").write_text("{}")
    index.refresh()
    assert index.revision == before, "what is being written is no file of a step"

    directory = run / "trajectories"
    write_trajectories(step_file(directory, 3, 0), [response([1, 1, 1], prompt_index=9)])
    index.refresh()
    assert rows(index)[0]["step"] == 3
    write_trajectories(step_file(directory, 3, 0), [response([1] * 5, prompt_index=9)])
    index.refresh()
    assert rows(index)[0]["length"] == 5
    step_file(directory, 3, 0).unlink()
    index.refresh()
    assert rows(index)[0]["step"] == 2


def test_files_of_ranks_that_are_no_longer_there_are_left_out(run: Path) -> None:
    write_trajectories(step_file(run / "trajectories", 1, 0), [response([1])], ranks=1)
    assert {row["rank"] for row in rows(index_of(run))} == {0}


def test_a_file_that_cannot_be_read_is_named_and_the_others_shown(run: Path) -> None:
    step_file(run / "trajectories", 7, 0).write_bytes(b"PAR1 no")
    pyarrow.parquet.write_table(pyarrow.table({"reward": [1.0]}), step_file(run / "trajectories", 8, 0))
    strange = {"prompt_index": ["x"], "sample": [0], "reward": [1.0], "response": [[1]]}
    pyarrow.parquet.write_table(pyarrow.table(strange), step_file(run / "trajectories", 9, 0))
    index = index_of(run)
    problems = index.summary()["problems"]
    assert len(rows(index)) == 5 and len(problems) == 3
    assert any("step-000008" in problem and "'prompt_index'" in problem for problem in problems)


def test_columns_of_other_versions(run: Path) -> None:
    path = step_file(run / "trajectories", 1, 0)
    table = pyarrow.parquet.read_table(path)
    later = table.append_column("turns", pyarrow.array([[1, 2]] * 3)).drop_columns(["detail", "mask", "row"])
    pyarrow.parquet.write_table(later, path)
    found = rows(index_of(run), Condition("step", "eq", "1"), Condition("rank", "eq", "0"))
    assert [row["length"] for row in found] == [4, 2, 0] and found[0]["row"] == -1


def test_only_files_of_the_index_are_opened(run: Path) -> None:
    with pytest.raises(DataError, match="rank 4 has recorded nothing"):
        index_of(run).file(1, 4)


def test_a_run_without_recordings(tmp_path: Path) -> None:
    index = index_of(make_run(tmp_path / "run", "nowhere"))
    assert rows(index) == [] and index.summary()["rows"] == 0 and index.groups() == []


def test_a_directory_that_has_not_changed_is_not_listed(run: Path) -> None:
    directory = run / "trajectories"
    past = 1_700_000_000
    os.utime(directory, (past, past))
    index = index_of(run)
    # What is there now is seen only because the directory changes with it.
    path = write(directory, 5)
    os.utime(directory, (past, past))
    index.refresh()
    assert rows(index)[0]["step"] == 2
    path.touch()
    write(directory, 6)
    index.refresh()
    assert [row["step"] for row in rows(index)[:2]] == [6, 5]


def write(directory: Path, step: int) -> Path:
    path = step_file(directory, step, 0)
    write_trajectories(path, [response([1], prompt_index=50 + step)])
    return path
