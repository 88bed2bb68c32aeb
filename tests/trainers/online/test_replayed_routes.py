"""Steps of the real loop whose ranks replay a mixture's routes, on trajectories made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hand_made_step
import numpy as np
import pytest
import torch
from hand_made_step import Step, step_recipe, take_step

from isotrain.data.packing import FREE
from isotrain.data.prepare.tiny import make_tiny
from isotrain.errors import RolloutError

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mixture")
    make_tiny(out, train_rows=4, validation_rows=1, architecture="qwen3_moe")
    return out


def step(mixture: Path, output: Path, replay: str, budget: int = 512, **sections: Any) -> Step:
    recipe = step_recipe(
        mixture,
        output,
        "cpu",
        algorithm={"name": "grpo", "mini_batch_size": 2, "router_replay": replay},
        data={"tokens_per_micro_batch": budget},
        **sections,
    )
    return take_step(recipe)


def with_routes(monkeypatch: pytest.MonkeyPatch, free: bool = False) -> None:
    """As an engine would have recorded them; equal prompts have equal ones."""
    groups = []
    for number, group in enumerate(hand_made_step.GROUPS):
        draw = np.random.default_rng(number)
        longest = max(map(len, group))
        routes = np.argsort(draw.random((longest, 2, 8)), axis=-1)[..., :2].astype(np.int16)
        routes = np.full_like(routes, FREE) if free else routes
        groups.append(tuple(replace(t, routes_TLK=routes[: len(t)]) for t in group))
    monkeypatch.setattr(hand_made_step, "GROUPS", groups)


def test_routes_of_the_engine(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all passes, whatever the micro-batches; free ones change nothing."""
    plain = step(mixture, tmp_path / "a", "disabled")
    with pytest.raises(RolloutError, match=r"router_replay: a response came without the experts"):
        step(mixture, tmp_path / "b", "R3")
    with monkeypatch.context() as patch:
        with_routes(patch, free=True)
        free = step(mixture, tmp_path / "c", "R3")
    with monkeypatch.context() as patch:
        with_routes(patch)
        forced = step(mixture, tmp_path / "d", "R3")
        small = step(mixture, tmp_path / "e", "R3", budget=42)
    for name in ("actor/pg_loss", "actor/grad_norm", "training/rollout_logp_diff_mean"):
        assert free.metrics[name] == plain.metrics[name], name
        assert forced.metrics[name] == pytest.approx(small.metrics[name], rel=1e-3, abs=1e-6), name
    assert sum(map(len, small.minis)) > sum(map(len, forced.minis))
    old = [run.found("old_logp_N") for run in (plain, free, forced, small)]
    assert all(torch.equal(a, b) for a, b in zip(old[0], old[1], strict=True))
    for a, b, c in zip(old[0], old[2], old[3], strict=True):
        torch.testing.assert_close(b, c, rtol=0, atol=1e-5)
        assert not len(a) or (a - b).abs().max() > 1e-4


def test_routes_of_the_old_policy(mixture: Path, tmp_path: Path) -> None:
    """Without a learning rate they are the policy's own; with one, the second update has the old ones."""
    still = {"optimizer": {"lr": 0.0}}
    plain, kept = (step(mixture, tmp_path / mode, mode, **still) for mode in ("disabled", "R2"))
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl"):
        assert plain.metrics[name] == kept.metrics[name], name
    large = {"optimizer": {"lr": 0.3}}
    plain, kept = (step(mixture, tmp_path / f"{mode}-large", mode, **large) for mode in ("disabled", "R2"))
    assert all(micro.batch.packed.routes is not None for mini in kept.minis for micro in mini)
    assert plain.policy[0][1].grad_norm == kept.policy[0][1].grad_norm
    assert plain.policy[1][1].grad_norm != kept.policy[1][1].grad_norm
