"""A run whose reward is the tests of code, on a real Ray with real sandboxes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from online_runs import OnlineRun, online_recipe

from isotrain.observe.metrics import read_metrics
from isotrain.process.sandbox import Limits
from sandboxes import bubblewrap

pytestmark = pytest.mark.ray


def test_code_is_scored_in_a_run(tiny: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (tiny / "prompts.jsonl").read_text().splitlines()[:8]]
    prompts = tmp_path / "prompts.jsonl"
    # Half of the rows have no tests.
    answers = (["assert f(1) == 1"], "42")
    prompts.write_text(
        "".join(json.dumps({**row, "answer": answers[i % 2]}) + "\n" for i, row in enumerate(rows))
    )
    recipe = online_recipe(
        tiny,
        tmp_path / "run",
        data={"train": str(prompts), "batch_size": 8},
        reward={"function": None, "code": {"score": "share"}, "failed_score": -1.0},
        trainer={"steps": 1},
    )
    with bubblewrap(Limits()):
        run = OnlineRun(recipe, tmp_path)
        (row,) = read_metrics(run.finish() / "metrics.jsonl")
    # The tiny model writes no code.
    assert row["reward/code/mean"] == 0.0 and row["reward/code/no_code/mean"] == 1.0
    assert row["reward/failures"] == row["reward/errors"] == 16.0
    assert row["critic/rewards/mean"] == -0.5
    assert "the row has no tests; check reward.answer_key" in run.text


def test_without_a_sandbox_a_run_ends_before_a_model_is_loaded(tiny: Path, tmp_path: Path) -> None:
    recipe = online_recipe(tiny, tmp_path / "run", reward={"function": None, "code": {}})
    run = OnlineRun(recipe, tmp_path, PATH=str(tmp_path))
    assert run.wait() == 1
    assert "reward.code.sandbox: bubblewrap is not installed: install bubblewrap" in run.text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
