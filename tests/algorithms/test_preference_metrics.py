from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from isotrain.algorithms.preference_losses import (
    calibration_sums,
    kto,
    pair_metrics,
    pair_sums,
    response_metrics,
    step_metrics,
)


def added(*parts: dict[str, torch.Tensor]) -> dict[str, float]:
    """As over micro-batches and ranks."""
    return {name: sum(part[name].item() for part in parts) for name in parts[0]}


def calibration_error(probabilities: list[float], happened: list[bool], cut: int, device: str) -> float:
    counted = {"found": torch.zeros(()), "called_wrong": torch.zeros(()), "wrong": torch.zeros(())}
    probability_N, happened_N = (torch.tensor(values, device=device) for values in (probabilities, happened))
    parts = [
        counted | calibration_sums(probability_N[own], happened_N[own], len(happened))
        for own in (slice(cut), slice(cut, None))
    ]
    return step_metrics(added(*parts))["calibration_error"]


@pytest.mark.parametrize("cut", [0, 3])
def test_calibration_by_hand(device_type: str, cut: int) -> None:
    # Two bins: 0.9 right once of two, and 0.62 (once as 0.38 for what did not happen) always right.
    probabilities, happened = [0.92, 0.92, 0.62, 0.38], [True, False, True, False]
    expected = abs(0.92 * 2 - 1) / 4 + abs(0.62 * 2 - 2) / 4
    assert calibration_error(probabilities, happened, cut, device_type) == pytest.approx(expected)


def test_an_undecided_or_a_perfect_model_has_no_error(device_type: str) -> None:
    assert calibration_error([0.5, 0.5, 0.5], [True, False, True], 1, device_type) == 0.0
    assert calibration_error([1.0, 0.0, 1.0], [True, False, True], 1, device_type) == 0.0
    assert calibration_error([1.0, 0.0], [False, True], 1, device_type) == 1.0


def test_calibrated_draws_have_almost_none(device_type: str) -> None:
    draw = np.random.default_rng(0)
    probabilities = draw.random(20_000)
    happened = draw.random(20_000) < probabilities
    assert calibration_error(probabilities.tolist(), happened.tolist(), 7_000, device_type) < 0.02


def test_spreads_of_pairs(device_type: str) -> None:
    chosen_N = torch.tensor([1.0, 2.0, 4.0, 0.5], device=device_type)
    rejected_N = torch.tensor([-1.0, 0.0, 1.0, 0.25], device=device_type)
    parts = [
        {
            "chosen_reward": chosen_N[own].sum() / 4,
            "rejected_reward": rejected_N[own].sum() / 4,
            **pair_sums(chosen_N[own], rejected_N[own], 4),
        }
        for own in (slice(1), slice(1, 4))
    ]
    metrics = pair_metrics(added(*parts))
    assert metrics["chosen_reward_std"] == pytest.approx(np.std(chosen_N.tolist()))
    assert metrics["rejected_reward_std"] == pytest.approx(np.std(rejected_N.tolist()))
    wins = [1 / (1 + math.exp(-m)) for m in (2.0, 2.0, 3.0, 0.25)]
    assert metrics["calibration_error"] == pytest.approx(sum(1 - p for p in wins) / 4)
    assert set(metrics) == {
        "chosen_reward",
        "rejected_reward",
        "chosen_reward_std",
        "rejected_reward_std",
        "calibration_error",
    }


def test_means_and_spreads_of_responses(device_type: str) -> None:
    logp_S = torch.tensor([3.0, 1.0, -2.0, 5.0], device=device_type)
    desirable_S = torch.tensor([True, False, True, False], device=device_type)
    parts = [
        kto(logp_S[own], torch.zeros_like(logp_S[own]), desirable_S[own], kl=0.0, responses=4, beta=0.5)[1]
        for own in (slice(3), slice(3, 4))
    ]
    metrics = response_metrics(added(*parts))
    assert metrics["chosen_reward"] == 0.25 and metrics["rejected_reward"] == 1.5
    assert metrics["margin"] == -1.25
    assert metrics["chosen_reward_std"] == pytest.approx(1.25)
    assert metrics["rejected_reward_std"] == pytest.approx(1.0)
    only = response_metrics(added(kto(logp_S, logp_S, desirable_S | True, kl=0.0, responses=4)[1]))
    assert only["rejected_reward"] == only["rejected_reward_std"] == 0.0


def test_f1_by_hand(device_type: str) -> None:
    """Of 10 steps 5 are wrong, 3 are called wrong, 2 of them rightly: precision 2/3, recall 2/5."""
    none = calibration_sums(torch.zeros(0, device=device_type), torch.zeros(0, device=device_type).bool(), 10)
    sums = {"found": 0.2, "called_wrong": 0.3, "wrong": 0.5, **{name: x.item() for name, x in none.items()}}
    assert step_metrics(sums)["f1"] == pytest.approx(2 * (2 / 3) * (2 / 5) / (2 / 3 + 2 / 5))
    assert step_metrics({**sums, "found": 0.0, "called_wrong": 0.0, "wrong": 0.0})["f1"] == 1.0


def test_bins_of_confidence_are_a_twentieth_wide(device_type: str) -> None:
    # 0.56 and 0.59 share a bin, where one's gap of -0.44 and the other's of 0.59 add up; 0.61 is in the next.
    assert calibration_error([0.56, 0.59], [True, False], 1, device_type) == pytest.approx(0.15 / 2)
    assert calibration_error([0.56, 0.61], [True, False], 1, device_type) == pytest.approx((0.44 + 0.61) / 2)
