"""Online runs of a mixture whose routes are replayed: from the engine (R3), or from the old policy (R2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from online_runs import OnlineRun, online_recipe, run_online

from isotrain.data.prepare.tiny import make_tiny
from isotrain.data.record import read_step
from isotrain.observe.metrics import read_metrics
from isotrain.recipe.schema import Recipe
from support import stable_metrics

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    make_tiny(path, train_rows=64, validation_rows=1, architecture="qwen3_moe")
    return path


def recipe(mixture: Path, output: Path, router: str, **rollout: Any) -> Recipe:
    return online_recipe(
        mixture,
        output,
        model={"path": str(mixture / "model"), "dtype": "bfloat16"},
        algorithm={"name": "grpo", "router_replay": router, "mini_batch_size": 2},
        rollout={"engine": "hf", "n": 4, "max_tokens": 12, "record": True, **rollout},
        trainer={"steps": 3, "save_every": 1},
    )


def test_the_engines_routes_are_recorded_replayed_and_resumed(mixture: Path, tmp_path: Path) -> None:
    run = run_online(recipe(mixture, tmp_path / "r3", "R3"), tmp_path, "r3")
    for record in read_step(run / "trajectories", 1):
        assert record.trajectory.routes_TLK is not None
    whole = stable_metrics(run)
    # The same responses in a run of their own: the same numbers, bit for bit.
    replayed = run_online(
        recipe(mixture, tmp_path / "again", "R3", replay=str(run), record=False), tmp_path, "again"
    )
    for before, after in zip(whole, stable_metrics(replayed), strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "training/rollout_logp_diff_mean"):
            assert before[name] == after[name], name
    # Without the routes, the same responses are further from what the ranks compute.
    free = run_online(
        recipe(mixture, tmp_path / "free", "disabled", replay=str(run), record=False), tmp_path, "free"
    )
    with_routes, without = (
        read_metrics(path / "metrics.jsonl")[0]["training/rollout_probs_diff_max"] for path in (run, free)
    )
    assert with_routes <= without
    killed = OnlineRun(recipe(mixture, tmp_path / "killed", "R3"), tmp_path, "killed")
    killed.wait_for_steps(1)
    killed.end()
    resumed = run_online(recipe(mixture, tmp_path / "killed", "R3"), tmp_path, "resumed")
    assert stable_metrics(resumed) == whole


def test_routes_of_the_old_policy_stay(mixture: Path, tmp_path: Path) -> None:
    run = run_online(recipe(mixture, tmp_path / "r2", "R2", record=False), tmp_path, "r2")
    assert len(read_metrics(run / "metrics.jsonl")) == 3
