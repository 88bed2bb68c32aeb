"""`isotrain runs` and `isotrain logs`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.observe.console import Console
from isotrain.observe.journal import Journal
from isotrain.observe.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    resolved = {"name": "[red]mine[/red]", "algorithm": {"name": "sft"}}
    run = RunDirectory.create(tmp_path / "runs" / "mine", "", resolved, {})
    journal = Journal(Console(), run)
    journal.message("warning: look")
    journal.start(3, 1)
    journal.update(1, {"train/loss": 2.0})
    journal.ended(ValueError("[bold]out of memory[/bold]\x1b[2J"))
    run.metrics.write_text('{"step": 1, "train/loss": 2.0}\n')
    return run


def said(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def test_runs_lists_state_step_and_metrics(run: RunDirectory) -> None:
    text = said("runs", str(run.path.parent))
    assert "failed" in text and "1/3" in text and "loss 2.0000" in text and "[bold]out of memory" in text
    (line,) = said("runs", str(run.path.parent), "--json").splitlines()
    found = json.loads(line)
    assert found["state"] == "failed" and found["step"] == 1 and found["path"] == str(run.path)
    assert "no runs in" in said("runs", str(run.checkpoints))
    assert "there is no directory" in said("runs", "nowhere", code=1)


def test_a_run_is_one_line_in_a_narrow_terminal(run: RunDirectory) -> None:
    line = json.dumps({"step": 2, **{f"train/metric_{number}": 1.0 for number in range(20)}})
    run.metrics.write_text(line + "\n")
    done = CliRunner().invoke(app, ["runs", str(run.path.parent)], env={"COLUMNS": "80"})
    lines = done.output.rstrip().splitlines()
    assert all(len(text) <= 80 for text in lines), done.output
    assert sum("failed" in text or "sft" in text for text in lines) == 1


def test_logs_prints_the_last_lines(run: RunDirectory) -> None:
    text = said("logs", str(run.path))
    assert "warning: look" in text and "step 1/3  loss 2.0000" in text and "failed: ValueError" in text
    assert said("logs", str(run.path), "-n", "1").count("\n") == 1
    # A run that has ended is not followed.
    assert "failed" in said("logs", str(run.path), "-f")
    assert "has no log" in said("logs", str(run.path.parent), code=1)
