"""GRPO with `rollout.exact`: no difference between engine and trainer, in any step."""

from __future__ import annotations

from pathlib import Path

import pytest
from online_runs import online_recipe, run_online

from isotrain.observe.metrics import read_metrics

pytestmark = pytest.mark.ray


def test_the_mismatch_is_zero(tiny: Path, tmp_path: Path) -> None:
    """Two mini-batches of several micro-batches, in the type that differs most; temperature too."""
    recipe = online_recipe(
        tiny,
        tmp_path / "run",
        model={"dtype": "bfloat16"},
        algorithm={"name": "grpo", "mini_batch_size": 2},
        data={
            "tokens_per_micro_batch": 96,
            "max_length": 64,
            "batch_size": 4,
            "train": str(tiny / "prompts.jsonl"),
        },
        rollout={"engine": "hf", "exact": True, "n": 4, "max_tokens": 16, "temperature": 0.8},
        trainer={"steps": 3},
    )
    rows = read_metrics(run_online(recipe, tmp_path) / "metrics.jsonl")
    assert len(rows) == 3 and len({row["critic/rewards/mean"] for row in rows}) > 1
    for row in rows:
        assert row["training/rollout_probs_diff_max"] == row["training/rollout_logp_diff_mean"] == 0.0
        assert row["rollout_corr/kl"] == row["rollout_corr/chi2_token"] == 0.0
        assert row["rollout/weight_check_diff"] == 0.0
