"""Runs on preference items that are killed and started again give the same metrics, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_kill import plan, run_with_kills

from isotrain.recipe.schema import Recipe
from isotrain.trainers.launch import launch
from preference_runs import ALGORITHMS, KIND, preference_recipe, write_preferences
from support import stable_metrics

pytestmark = pytest.mark.heavy


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("on", ["cpu", "npu"])
@pytest.mark.usefixtures("one_thread")
def test_a_killed_run_has_the_metrics_of_one_that_was_not(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, on: str
) -> None:
    monkeypatch.setenv("ISOTRAIN_CACHE", str(tmp_path / "cache"))
    rows = write_preferences(tmp_path, count=80)

    def recipe(output: str) -> Recipe:
        return preference_recipe(
            name,
            tiny,
            rows,
            tmp_path / output,
            on,
            data={"validation": str(rows / f"{KIND[name]}-held-out.jsonl"), "validation_rows": 16},
            trainer={"steps": 24, "save_every": 2, "validate_every": 8},
            observe={"loggers": ["console"]},
        )

    story = run_with_kills(recipe("killed"), plan(seed=len(name), count=2, victims=("all",)), tmp_path)
    # Its own cache: a reference that a killed start left behind must be the one from before training.
    monkeypatch.setenv("ISOTRAIN_CACHE", str(tmp_path / "other-cache"))
    launch(recipe("whole"), "")
    assert stable_metrics(tmp_path / "killed") == stable_metrics(tmp_path / "whole"), story
