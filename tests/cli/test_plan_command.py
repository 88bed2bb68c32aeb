"""`isotrain plan` as people type it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.tools.plan.ledger import can_count

RUNNER = CliRunner()


@pytest.mark.skipif(not can_count(), reason="this torch cannot run a step on fake tensors")
def test_a_recipe_that_fits_and_one_that_does_not(tiny: Path) -> None:
    command = ["plan", "tiny-sft", f"model.path={tiny / 'model'}", "--devices", "4", "--device", "a2"]
    told = RUNNER.invoke(app, command)
    assert told.exit_code == 0, told.output
    assert "fits: " in told.output and "of 64 GB on each of 4 devices" in told.output
    assert "bottleneck: update" in told.output and "How sure: " in told.output
    small = RUNNER.invoke(app, [*command, "--memory", "1.55GB", "--json"])
    assert small.exit_code == 1
    found = json.loads(small.output)
    assert found["fits"] is False and found["needed_gb"] > 1.55 and found["ranks"] == 4


def test_what_cannot_be_planned(tiny: Path) -> None:
    command = ["plan", "tiny-sft", f"model.path={tiny / 'model'}"]
    for more, words in (
        (["--memory", "much"], "write it as 64GB"),
        (["--device", "tpu"], "is not known"),
        (["model.path=/nowhere"], "has no config.json"),
    ):
        told = RUNNER.invoke(app, [*command, *more])
        assert told.exit_code == 1 and words in told.output, told.output
