"""Logs of runs that were resumed: what the log says last of a step is what the run did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_samples import tensorboard

from isotrain.errors import DataError
from isotrain.tools.parity.read.columns import MAX_RESUMES
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.run import RunLog

Row = tuple[int, dict[str, float]]


def write_csv(path: Path, rows: list[Row]) -> None:
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    lines = [
        ",".join([str(step), *(repr(values[n]) if n in values else "" for n in names)])
        for step, values in rows
    ]
    path.write_text("\n".join([",".join(["step", *names]), *lines]) + "\n")


def write_jsonl(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps({"step": step, **values}) + "\n" for step, values in rows))


def write_verl_file(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps({"step": step, "data": values}) + "\n" for step, values in rows))


def write_verl_console(path: Path, rows: list[Row]) -> None:
    lines = [
        " - ".join(
            [f"(TaskRunner pid=7) step:{step}", *(f"{name}:{value!r}" for name, value in values.items())]
        )
        for step, values in rows
    ]
    path.write_text("\n".join(lines) + "\n")


def write_openrlhf(path: Path, rows: list[Row]) -> None:
    path.write_text(
        "".join(f"INFO ppo_trainer.py:1] Global step {step}: {values}\n" for step, values in rows)
    )


WRITERS: dict[str, Callable[[Path, list[Row]], None]] = {
    "a.csv": write_csv,
    "a.jsonl": write_jsonl,
    "verl.jsonl": write_verl_file,
    "verl.log": write_verl_console,
    "openrlhf.log": write_openrlhf,
}


def curve(run: RunLog, name: str) -> dict[int, float]:
    series = run.metrics[name]
    return dict(zip(series.steps_S.tolist(), series.values_S.tolist(), strict=True))


def attempt(first: int, last: int, offset: float, every: int = 0) -> list[Row]:
    """One row a step, with a validation in it every so many steps."""
    return [
        (step, {"loss": step + offset, **({"val": step + offset} if every and step % every == 0 else {})})
        for step in range(first, last + 1)
    ]


@pytest.mark.parametrize("name", WRITERS)
def test_the_later_values_stand(tmp_path: Path, name: str) -> None:
    """Stopped at 120, resumed after 100, ended at 110: it has 110 steps, whatever 111 to 120 were."""
    WRITERS[name](tmp_path / name, attempt(1, 120, 0.0, every=10) + attempt(101, 110, 0.5, every=10))
    run = read_run(tmp_path / name)
    expected = {step: step + (0.5 if step > 100 else 0.0) for step in range(1, 111)}
    assert curve(run, "loss") == expected
    assert curve(run, "val") == {step: value for step, value in expected.items() if step % 10 == 0}
    line = 121 + (name == "a.csv")
    assert run.notes == (f"resumed: line {line} goes back from step 120 to step 101; the later values stand",)


@pytest.mark.parametrize("name", WRITERS)
def test_a_resume_that_goes_beyond_and_a_second_one(tmp_path: Path, name: str) -> None:
    rows = attempt(1, 12, 0.0) + attempt(11, 20, 0.25) + attempt(16, 30, 0.5)
    WRITERS[name](tmp_path / name, rows)
    run = read_run(tmp_path / name)
    offsets = [0.0] * 10 + [0.25] * 5 + [0.5] * 15
    assert curve(run, "loss") == {step: step + offset for step, offset in enumerate(offsets, start=1)}
    assert len(run.notes) == 2 and "from step 20 to step 16" in run.notes[1]


@pytest.mark.parametrize("name", WRITERS)
def test_a_resume_that_computes_the_same_bits_still_ends_where_it_ended(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, attempt(1, 12, 0.0) + attempt(9, 10, 0.0))
    run = read_run(tmp_path / name)
    assert list(curve(run, "loss")) == list(range(1, 11)) and len(run.notes) == 1


@pytest.mark.parametrize("name", WRITERS)
def test_the_last_step_may_be_done_again(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, attempt(1, 5, 0.0) + attempt(5, 7, 0.5))
    run = read_run(tmp_path / name)
    assert curve(run, "loss") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.5, 6: 6.5, 7: 7.5}
    assert "from step 5 to step 5" in run.notes[0]


@pytest.mark.parametrize("name", WRITERS)
def test_a_line_that_is_printed_twice_is_no_resume(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, attempt(1, 5, 0.0) + attempt(5, 5, 0.0) + attempt(6, 6, 0.0))
    run = read_run(tmp_path / name)
    assert list(curve(run, "loss")) == [1, 2, 3, 4, 5, 6] and run.notes == ()


def test_verl_validates_the_checkpoint_before_it_goes_on(tmp_path: Path) -> None:
    """The line `step:10 - val` of the new attempt keeps the losses that the old one had at step 10."""
    rows = [*attempt(1, 15, 0.0, every=5), (10, {"val": 10.5}), *attempt(11, 12, 0.5, every=5)]
    write_verl_console(tmp_path / "log", rows)
    run = read_run(tmp_path / "log")
    assert curve(run, "loss") == {step: step + (0.5 if step > 10 else 0.0) for step in range(1, 13)}
    assert curve(run, "val") == {5: 5.0, 10: 10.5}
    assert run.notes == ("resumed: line 16 goes back from step 15 to step 10; the later values stand",)


def test_two_rows_a_step_are_one_resume(tmp_path: Path) -> None:
    def rows(first: int, last: int, offset: float) -> list[Row]:
        return [(step, {name: step + offset}) for step in range(first, last + 1) for name in ("loss", "val")]

    write_jsonl(tmp_path / "a.jsonl", rows(1, 8, 0.0) + rows(6, 7, 0.5))
    run = read_run(tmp_path / "a.jsonl")
    assert curve(run, "loss") == curve(run, "val") == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6.5, 7: 7.5}
    assert run.notes == ("resumed: line 17 goes back from step 8 to step 6; the later values stand",)


def test_a_late_row_of_another_metric_is_no_resume(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "a.jsonl", [*attempt(1, 6, 0.0), (4, {"val": 1.0}), *attempt(7, 9, 0.0), (8, {"val": 2.0})]
    )
    run = read_run(tmp_path / "a.jsonl")
    assert list(curve(run, "loss")) == list(range(1, 10)) and curve(run, "val") == {4: 1.0, 8: 2.0}
    assert run.notes == ()


def test_a_metric_that_only_the_given_up_attempt_had_is_gone(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*attempt(1, 5, 0.0), (6, {"late": 1.0}), *attempt(2, 3, 0.5)])
    assert set(read_run(tmp_path / "a.jsonl").metrics) == {"loss"}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_of_two_runs_in_turn_are_refused(tmp_path: Path, name: str) -> None:
    rows = [row for pair in zip(attempt(1, 4, 0.0), attempt(1, 4, 0.5), strict=True) for row in pair]
    WRITERS[name](tmp_path / name, rows)
    line = 2 + (name == "a.csv")
    with pytest.raises(
        DataError, match=rf"line {line}: its steps repeat or go back 4 times: is this more than one"
    ):
        read_run(tmp_path / name)


def test_more_resumes_than_a_run_has_are_refused(tmp_path: Path) -> None:
    """Two runs in blocks, as two writers with buffers leave them."""
    for count, refused in ((MAX_RESUMES, False), (MAX_RESUMES + 1, True)):
        rows = [
            row
            for first in range(0, 5 * count, 5)
            for offset in (0.0, 0.5)
            for row in attempt(first, first + 4, offset)
        ]
        write_jsonl(tmp_path / "a.jsonl", rows)
        if refused:
            with pytest.raises(DataError, match=r"line 1006: its steps repeat or go back 101 times"):
                read_run(tmp_path / "a.jsonl")
        else:
            assert read_run(tmp_path / "a.jsonl").notes[-1] == "resumed 95 more times"


def test_tensorboard_says_it_too(tmp_path: Path) -> None:
    tensorboard(tmp_path / "events.out.tfevents.1.host", steps=9)
    tensorboard(tmp_path / "events.out.tfevents.2.host", steps=3)
    run = read_run(tmp_path)
    assert len(run.metrics["train/loss"]) == 3
    assert run.notes == ("resumed: 'events.out.tfevents.2.host' starts at step 0; the later values stand",)
