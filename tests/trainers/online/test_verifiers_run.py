"""A whole run in which the policy is trained by an environment of verifiers, in a Python of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from online_runs import OnlineRun, online_recipe

from isotrain.data.prepare.verifiers_tasks import prepare_verifiers
from isotrain.observe.metrics import read_metrics
from support import python_of

PACKAGE = str(Path(__file__).parents[2] / "environments" / "verifiers_package")
ARGUMENTS = {"taskset": {"tasks": 24}, "agent": {"runtime": {"type": "subprocess"}}}
STEPS = 6

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def test_a_whole_run_with_an_environment_of_verifiers(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_of("agents")
    found = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [PACKAGE, found])))
    prepare_verifiers("letters", tmp_path, arguments=ARGUMENTS, python=python)
    agent = {"verifiers": "letters", "arguments": ARGUMENTS, "python": python}
    recipe = online_recipe(
        tiny,
        tmp_path / "run",
        data={
            "train": str(tmp_path / "train.jsonl"),
            "batch_size": 4,
            "max_length": 64,
            "tokens_per_micro_batch": 4096,
        },
        reward={"environment": {}, "function": None, "answer_key": "answer"},
        trainer={"steps": STEPS},
        rollout={
            "engine": "hf",
            "n": 4,
            "max_tokens": 60,
            "agent": {
                **agent,
                "max_turns": 2,
                "max_turn_tokens": 8,
                "concurrency": 8,
                "start_timeout": 300.0,
            },
        },
    )
    run = OnlineRun(recipe, tmp_path, PYTHONPATH=PACKAGE).finish(900)
    rows = read_metrics(run / "metrics.jsonl")
    assert len(rows) == STEPS
    for row in rows:
        assert row["reward/failures"] == 0.0 and row["episode/turns/mean"] == 2.0
        # 0.5 for two turns, and up to 2 for the letters.
        assert 0.5 <= row["critic/score/mean"] <= 2.5
        assert row["training/rollout_probs_diff_max"] < 1e-5 and row["actor/grad_norm"] > 0
