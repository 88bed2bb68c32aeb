"""The table of trajectories: rows of all ranks, sorted, filtered, paged; files that come, change and go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from view_runs import make_run, response

from isotrain.data import parquet_bounds
from isotrain.data.parquet_bounds import MOST_ROWS
from isotrain.data.record import step_file, write_trajectories
from isotrain.errors import DataError
from isotrain.tools.view.trajectories import Condition, TrajectoryIndex


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


def test_a_row_has_lengths_rewards_and_its_prompt(run: Path) -> None:
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


def test_sorts_by_a_text(run: Path) -> None:
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
def test_conditions_select_rows(run: Path, condition: Condition, found: int) -> None:
    assert len(rows(index_of(run), condition)) == found


def test_pages_hold_each_row_once(run: Path) -> None:
    index = index_of(run)
    pages = [index.page([], "finished", True, offset, 2) for offset in (0, 2, 4, 6)]
    seen = [(row["step"], row["rank"], row["index"]) for page in pages for row in page["rows"]]
    assert len(seen) == len(set(seen)) == 5 and pages[0]["found"] == 5


def test_a_group_may_be_on_two_ranks(run: Path) -> None:
    group = index_of(run).group(1, 1, 10)
    assert [(row["sample"], row["rank"]) for row in group] == [(0, 0), (1, 1)]


def test_follows_new_replaced_and_removed_files(run: Path) -> None:
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


def test_reads_files_with_the_columns_of_other_versions(run: Path) -> None:
    path = step_file(run / "trajectories", 1, 0)
    table = pyarrow.parquet.read_table(path)
    later = table.append_column("turns", pyarrow.array([[1, 2]] * 3)).drop_columns(["detail", "mask", "row"])
    pyarrow.parquet.write_table(later, path)
    found = rows(index_of(run), Condition("step", "eq", "1"), Condition("rank", "eq", "0"))
    assert [row["length"] for row in found] == [4, 2, 0] and found[0]["row"] == -1


def test_only_files_of_the_index_are_opened(run: Path) -> None:
    with pytest.raises(DataError, match="rank 4 has recorded nothing"):
        index_of(run).file(1, 4)


def test_a_run_without_recordings_has_no_rows(tmp_path: Path) -> None:
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


def list_bomb(path: Path) -> None:
    """One row with a list of zeros, in three of the columns that the table is made from."""
    count = 18_000_000
    zeros = pyarrow.array(np.zeros(count, np.int32))
    columns = {"mask": pyarrow.array(np.zeros(count, np.bool_)), "version": zeros, "prompt": zeros}
    bounds = pyarrow.array([0, count], pyarrow.int32())
    lists = {name: pyarrow.ListArray.from_arrays(bounds, flat) for name, flat in columns.items()}
    write_bomb(path, 1, lists)


def text_bomb(path: Path) -> None:
    """Rows that name one long text of a dictionary."""
    count, text = 4096, pyarrow.array(["x" * (1 << 23)])
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(count, np.int32)), text)
    write_bomb(path, count, {"source": texts})


def row_bomb(path: Path) -> None:
    write_bomb(path, MOST_ROWS + 1, {})


def write_bomb(path: Path, rows: int, columns: dict[str, Any]) -> None:
    numbers = {name: pyarrow.array(np.zeros(rows, np.int64)) for name in ("prompt_index", "sample", "reward")}
    empty = pyarrow.ListArray.from_arrays(
        pyarrow.array(np.zeros(rows + 1, np.int32)), pyarrow.array([], pyarrow.int32())
    )
    table = pyarrow.table({**numbers, "response": empty, **columns})
    pyarrow.parquet.write_table(table, path, compression="zstd", row_group_size=rows)


READ = """
import resource, sys
from pathlib import Path
import pyarrow.parquet
from isotrain.errors import DataError
from isotrain.tools.view.parquet import read_index

pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + (128 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    read_index(Path(sys.argv[1]))
except DataError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("make", [list_bomb, text_bomb, row_bomb])
def test_a_small_file_that_decodes_to_a_large_one_is_refused(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "bomb.parquet"
    make(path)
    assert path.stat().st_size < 100_000
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("refused: bomb.parquet cannot be read as recorded trajectories: "), (
        done.stdout + done.stderr
    )
    assert "at most" in done.stdout or "may take more than" in done.stdout


def test_the_bound_is_taken_from_page_headers_and_not_the_footer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is the same whatever encoding the pages are in, and grows with their values."""
    for settings in ({}, {"use_dictionary": False}, {"data_page_version": "2.0"}, {"compression": "none"}):
        path = tmp_path / "rows.parquet"
        flat = pyarrow.array(np.arange(30_000, dtype=np.int32) // 1000)
        lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, 10_000, 30_000], pyarrow.int32()), flat)
        pyarrow.parquet.write_table(pyarrow.table({"response": lists}), path, data_page_size=512, **settings)
        for most, fits in ((30_000 * 12 + 200_000, True), (30_000 * 12 - 1, False)):
            monkeypatch.setattr(parquet_bounds, "MOST_BYTES", most)
            with path.open("rb") as stream, pyarrow.parquet.ParquetFile(stream) as file:
                try:
                    parquet_bounds.check_group(file, stream, 0, ["response"], lists=["response"])
                    assert fits, settings
                except DataError:
                    assert not fits, settings
