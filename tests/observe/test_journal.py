"""What a run leaves in its directory about itself, and how runs are listed from it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isotrain.errors import RecipeError
from isotrain.observe import journal as journal_module
from isotrain.observe.console import Console
from isotrain.observe.journal import Journal, find_runs, state_of
from isotrain.observe.metrics import MetricsLog
from isotrain.observe.run_directory import RunDirectory


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        self.now += 2.0
        return self.now


class Shown(Console):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def update(self, step: int, values: Any) -> None:
        self.calls.append(("update", step))

    def message(self, text: str) -> None:
        self.calls.append(("message", text))


def started(path: Path) -> RunDirectory:
    resolved = {"name": "a run", "algorithm": {"name": "grpo"}}
    return RunDirectory.create(path, "name: a run\n", resolved, {"time": "now"})


def status(run: RunDirectory) -> dict[str, Any]:
    found = json.loads(run.status.read_text())
    assert isinstance(found, dict)
    return found


def test_a_run_that_finishes(tmp_path: Path) -> None:
    run, shown = started(tmp_path / "run"), Shown()
    journal = Journal(shown, run, clock=Clock())
    assert status(run)["state"] == "starting"
    journal.message("warning: beware\nof it")
    journal.start(2, 1)
    journal.update(1, {"train/loss": 0.5})
    journal.waiting("responses 3 of 8")
    assert status(run)["state"] == "running" and status(run)["waiting"] == "responses 3 of 8"
    journal.update(2, {"train/loss": 0.25})
    journal.ended(None)
    assert status(run) | {"time": 0} == {
        "state": "finished",
        "step": 2,
        "steps": 2,
        "waiting": "",
        "time": 0,
        "host": status(run)["host"],
        "process": os.getpid(),
    }
    lines = [line.partition(" ")[2] for line in run.log.read_text().splitlines()]
    assert lines[:2] == ["warning: beware", "of it"]
    assert lines[2].startswith("step 1/2  loss 0.5000") and lines[3].startswith("step 2/2  loss 0.2500")
    assert shown.calls == [("message", "warning: beware\nof it"), ("update", 1), ("update", 2)]


@pytest.mark.parametrize(
    ("error", "state"),
    [(ValueError("no\nluck"), "failed"), (KeyboardInterrupt(), "stopped"), (None, "stopped")],
)
def test_a_run_that_ends_early(tmp_path: Path, error: BaseException | None, state: str) -> None:
    run = started(tmp_path / "run")
    journal = Journal(Console(), run)
    journal.start(9, 1)
    journal.update(4, {})
    journal.ended(error)
    found = state_of(run.path)
    assert (found.state, found.step, found.steps) == (state, 4, 9)
    if isinstance(error, ValueError):
        assert found.waiting == "ValueError: no" and "failed: ValueError: no" in run.log.read_text()


def test_a_lost_directory_costs_the_log_and_no_training(tmp_path: Path) -> None:
    run, shown = started(tmp_path / "run"), Shown()
    journal = Journal(shown, run, clock=Clock())
    journal.message("before")
    run.path.rename(tmp_path / "gone")
    journal.start(2, 1)
    journal.update(1, {})
    journal.message("still there")
    journal.ended(None)
    assert shown.calls == [("message", "before"), ("update", 1), ("message", "still there")]
    assert not run.path.exists(), "it is not made again"
    gone = RunDirectory(tmp_path / "gone")
    assert gone.log.read_text().endswith(" before\n") and status(gone)["state"] == "starting"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_costs_the_log_and_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, shown = started(tmp_path / "run"), Shown()
    opened: set[str] = set()

    def open_full(path: Path, mode: str) -> Any:
        opened.add(path.suffix)
        return open("/dev/full", mode, buffering=0)

    monkeypatch.setattr(journal_module, "open_own", open_full)
    journal = Journal(shown, run, clock=Clock())
    journal.message("still there")
    journal.start(2, 1)
    journal.update(1, {})
    journal.ended(None)
    assert opened == {".txt", ".tmp"}, "the log and the status were written to"
    assert shown.calls == [("message", "still there"), ("update", 1)]
    assert not run.log.exists() and not run.status.exists()


@pytest.mark.parametrize("name", ["log", "status", "metrics"])
def test_links_of_a_received_run_are_not_followed(tmp_path: Path, name: str) -> None:
    run, target = started(tmp_path / "run"), tmp_path / "target"
    target.write_text('{"step": 1}\n')
    getattr(run, name).symlink_to(target)
    journal = Journal(Console(), run, clock=Clock())
    journal.start(2, 1)
    journal.message("said")
    journal.ended(None)
    if name == "metrics":
        with pytest.raises(RecipeError, match="make it a plain file"):
            MetricsLog.resume(run.metrics, 1)
    assert target.read_text() == '{"step": 1}\n'


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_whether_a_run_goes_on_is_told_by_its_lock(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    command = [sys.executable, "-c", HOLD, str(run.path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "held\n"
        assert state_of(run.path).state == "starting"
        journal = Journal(Console(), run)
        journal.start(9, 1)
        assert state_of(run.path).state == "running"
        # A start again: what the status says is of the one before.
        later = run.status.stat().st_mtime + 60
        os.utime(run.environment, (later, later))
        assert state_of(run.path).state == "starting"
        run.metrics.write_text('{"step": 1}\n')  # a version that wrote no status
        os.utime(run.metrics, (later + 60, later + 60))
        assert state_of(run.path).state == "running"
        job.kill()
    assert state_of(run.path).state == "killed"


def test_a_run_on_another_machine_is_believed_for_a_while(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    Journal(Console(), run).start(9, 1)
    run.status.write_text(json.dumps({**status(run), "host": "elsewhere"}))
    now = run.status.stat().st_mtime
    assert state_of(run.path, now + 10).state == "running"
    assert state_of(run.path, now + journal_module.SECONDS_BELIEVED + 10).state == "killed"


def test_the_last_metrics(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    rows = [{"step": step, "critic/score/mean": step / 4, "x": "y" * 90} for step in range(3000)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    run.metrics.write_text(
        text + json.dumps({"step": 2999, "val-core/a/reward/mean@1": 0.5}) + '\n{"step": 3'
    )
    found = state_of(run.path)
    assert found.step == 2999 and found.state == "ended" and found.steps is None
    assert "score 749.750" in found.metrics and "0.5" in found.metrics


def test_runs_are_found_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b/c", "d/e/f", "d/e/f/checkpoints/inner", "1/2/3/4", ".hidden/x"):
        started(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "resolved.json").write_text("[" * 100_000)
    found = {str(run.path.relative_to(tmp_path)): run for run in find_runs(tmp_path)}
    assert set(found) == {"a", "b/c", "d/e/f"}
    assert found["a"].name == "a" and found["b/c"].algorithm == "grpo"
    monkeypatch.setattr(journal_module, "MOST_DIRECTORIES", 2)
    assert len(find_runs(tmp_path)) <= 2


def test_looking_takes_no_lock(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    with open(run.path / ".lock", "w") as file:
        state_of(run.path)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
