"""The names of the reference page, and that a loop can call by name without knowing what it calls."""

from __future__ import annotations

import inspect

import pytest
import torch
from steps import LENGTHS, MASK, numbers, whole

from isotrain.algorithms.advantages import ADVANTAGES, whiten
from isotrain.algorithms.aggregation import AGGREGATIONS
from isotrain.algorithms.kl import KL_ESTIMATORS
from isotrain.algorithms.policy_losses import POLICY_LOSSES
from isotrain.algorithms.segments import spread


def test_names() -> None:
    assert list(ADVANTAGES) == ["ppo", "grpo", "rloo", "reinforce++", "reinforce++-baseline", "remax"]
    assert list(POLICY_LOSSES) == ["clip", "gspo", "cispo", "reinforce", "gmpo", "sapo", "dppo-tv", "dppo-kl"]
    assert set(AGGREGATIONS) == {
        "token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    }
    assert set(KL_ESTIMATORS) == {"k1", "abs", "k2", "k3"}


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_with_every_loss(name: str, loss: str, device_type: str) -> None:
    """The loop of a trainer in short."""
    share = whole(LENGTHS, MASK, device=device_type)
    estimator = ADVANTAGES[name]
    has = {"values_N": numbers(1, device=device_type), "greedy_R": numbers(2, 3, device=device_type)}
    if estimator.per == "trajectory":
        group_R = torch.tensor([4, 4, 4], device=device_type)
        advantages_R = estimator.function(numbers(0, 3, device=device_type), group_R)
        advantages_N = spread(advantages_R, LENGTHS)
    else:
        needed = {key: has[key] for key in estimator.needs}
        rewards_N = numbers(0, device=device_type)
        advantages_N, returns_N = estimator.function(rewards_N, share.mask_N, LENGTHS, **needed)
        assert returns_N.shape == (10,)
    if estimator.whiten:
        advantages_N = whiten(advantages_N, share.mask_N)
        assert advantages_N[share.mask_N].mean().item() == pytest.approx(0, abs=1e-6)
    logp_N = numbers(3, device=device_type).requires_grad_()
    value, metrics = POLICY_LOSSES[loss](logp_N, logp_N.detach() + 0.01, advantages_N, share)
    value.backward()
    assert logp_N.grad is not None and logp_N.grad.isfinite().all() and logp_N.grad.any()
    assert set(metrics) == {
        f"actor/{key}" for key in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "clip",
            {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "dual_clip": 3.0, "aggregation": "token-mean"},
        ),
        ("gspo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "aggregation": "seq-mean-token-mean"}),
        ("cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "aggregation": "token-mean"}),
        ("reinforce", {"aggregation": "token-mean"}),
        ("gmpo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "aggregation": "seq-mean-token-mean"}),
        ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05, "aggregation": "seq-mean-token-mean"}),
        (
            "dppo-tv",
            {
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.2,
                "max_ratio": 20.0,
                "aggregation": "token-mean",
            },
        ),
    ],
)
def test_defaults_are_the_published_ones(name: str, options: dict[str, object]) -> None:
    parameters = inspect.signature(POLICY_LOSSES[name]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    assert defaults == {**options, "correction_N": None}
