"""`isotrain plan` as people type it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.cli.plan import whole_run
from isotrain.tools.plan.ledger import can_count

RUNNER = CliRunner()


@pytest.mark.skipif(not can_count(), reason="this torch cannot run a step on fake tensors")
def test_a_recipe_that_fits_and_one_that_does_not(tiny: Path) -> None:
    command = ["plan", "tiny-sft", f"model.path={tiny / 'model'}", "--devices", "4", "--device", "a2"]
    command.append("trainer.steps=60")
    told = RUNNER.invoke(app, command)
    assert told.exit_code == 0, told.output
    assert "fits: " in told.output and "of 64 GB on each of 4 devices" in told.output
    assert "the whole run: 60 steps, about " in told.output
    assert "bottleneck: update" in told.output and "How sure: " in told.output
    small = RUNNER.invoke(app, [*command, "--memory", "1.55GB", "--json"])
    assert small.exit_code == 1
    found = json.loads(small.output)
    assert found["fits"] is False and found["needed_gb"] > 1.55 and found["ranks"] == 4
    assert found["steps"] == 60 and found["run_hours"] == pytest.approx(
        60 * found["step_seconds"] / 3600, abs=0.01
    )


@pytest.mark.parametrize(
    ("steps", "seconds", "says"),
    [
        (None, 1.0, "its steps are not known"),
        (1, 30.0, "1 step, about 30.0 seconds"),
        (100, 90.0, "100 steps, about 2.5 hours"),
        (1000, 864.0, "1,000 steps, about 10.0 days"),
    ],
)
def test_tells_how_long_the_whole_run_takes(steps: int | None, seconds: float, says: str) -> None:
    assert says in whole_run(steps, seconds)


def test_what_cannot_be_planned(tiny: Path) -> None:
    command = ["plan", "tiny-sft", f"model.path={tiny / 'model'}"]
    for more, words in (
        (["--memory", "much"], "write it as 64GB"),
        (["--device", "tpu"], "is not known"),
        (["model.path=/nowhere"], "has no config.json"),
    ):
        told = RUNNER.invoke(app, [*command, *more])
        assert told.exit_code == 1 and words in told.output, told.output
