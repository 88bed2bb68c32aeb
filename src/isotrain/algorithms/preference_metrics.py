"""Metrics of preference items, from sums that add up over micro-batches and ranks.

N: labels of a micro-batch, K: bins of confidence.
"""

from __future__ import annotations

import math

import torch

from isotrain.algorithms.segments import assert_aligned, widen

Sums = dict[str, torch.Tensor]
Metrics = dict[str, float]

BINS = 10


def calibration_sums(probability_N: torch.Tensor, happened_N: torch.Tensor, count: int) -> Sums:
    """How far confidence is ahead of the truth, in bins of confidence, as shares of `count` labels.

    `probability_N` is what the model gives to what `happened_N` says. An undecided one is half right.
    """
    assert_aligned(probability_N, happened_N)
    confidence_N = torch.maximum(probability_N, 1 - probability_N)
    right_N = torch.where(
        probability_N == 0.5, 0.5, ((probability_N > 0.5) == happened_N).to(probability_N.dtype)
    )
    bin_N = ((confidence_N - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    gap_N = (confidence_N - right_N) / count
    return {f"gap_{k}": torch.where(bin_N == k, gap_N, 0.0).sum() for k in range(BINS)}


def pair_sums(chosen_N: torch.Tensor, rejected_N: torch.Tensor, pairs: int) -> Sums:
    """Squares of rewards and calibration of pairs: the chosen response wins with `sigmoid(margin)`."""
    chosen_N, rejected_N = widen(chosen_N), widen(rejected_N)
    wins_N = torch.sigmoid(chosen_N - rejected_N)
    return {
        "chosen_square": chosen_N.square().sum() / pairs,
        "rejected_square": rejected_N.square().sum() / pairs,
        **calibration_sums(wins_N, torch.ones_like(wins_N, dtype=torch.bool), pairs),
    }


def pair_metrics(metrics: Metrics) -> Metrics:
    """Metrics of pairs: means as they are, the spread of both sides' rewards, the calibration error."""
    means = dict(metrics)
    spreads = {
        f"{side}_reward_std": _spread(means.pop(f"{side}_square"), means[f"{side}_reward"])
        for side in ("chosen", "rejected")
    }
    return _with_calibration({**means, **spreads})


def response_metrics(metrics: Metrics) -> Metrics:
    """Metrics of responses: mean and spread of the rewards of each kind, from sums over both kinds."""
    rest, rewards = dict(metrics), {}
    for kind in ("chosen", "rejected"):
        total, square = rest.pop(f"{kind}_reward_share"), rest.pop(f"{kind}_square_share")
        count = rest.pop(f"{kind}_share")
        rewards[f"{kind}_reward"] = total / count if count else 0.0
        rewards[f"{kind}_reward_std"] = _spread(square / count, total / count) if count else 0.0
    return {**rest, **rewards, "margin": rewards["chosen_reward"] - rewards["rejected_reward"]}


def step_metrics(metrics: Metrics) -> Metrics:
    """Metrics of steps: F1 of finding the wrong ones, the calibration error."""
    counted = ("found", "called_wrong", "wrong")
    hits, called, wrong = (metrics[name] for name in counted)
    rest = {name: value for name, value in metrics.items() if name not in counted}
    return _with_calibration({**rest, "f1": 2 * hits / (called + wrong) if called + wrong else 1.0})


def _spread(square: float, mean: float) -> float:
    return math.sqrt(max(0.0, square - mean * mean))


def _with_calibration(metrics: Metrics) -> Metrics:
    """The expected calibration error: the mean distance of confidence and truth over the bins."""
    error = sum(abs(metrics.pop(f"gap_{k}")) for k in range(BINS))
    return {**metrics, "calibration_error": error}
