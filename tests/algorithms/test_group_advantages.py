from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from steps import numbers

from isotrain.algorithms.advantages.grpo import grpo
from isotrain.algorithms.advantages.reinforce_pp import reinforce_pp_baseline
from isotrain.algorithms.advantages.rloo import rloo
from isotrain.algorithms.whitening import Convention

# Two prompts with three responses each, not in order, and one with a single response.
REWARDS_R = torch.tensor([1.0, 0.0, 4.0, 0.0, 1.0, 2.0, 5.0])
GROUP_R = torch.tensor([7, 3, 7, 3, 3, 7, 9])

# Group 7: rewards 1, 4, 2, mean 7/3, variance (16 + 25 + 1)/9 / 2 = 7/3.
# Group 3: rewards 0, 0, 1, mean 1/3, variance (1 + 1 + 4)/9 / 2 = 1/3.
MEAN_R = torch.tensor([7 / 3, 1 / 3, 7 / 3, 1 / 3, 1 / 3, 7 / 3, 0])
STD_R = torch.tensor([7 / 3, 1 / 3, 7 / 3, 1 / 3, 1 / 3, 7 / 3, 1]).sqrt()

ESTIMATORS = [grpo, rloo, reinforce_pp_baseline, lambda r, g: grpo(r, g, scale_by_std=False)]
IDS = ["grpo", "rloo", "reinforce++-baseline", "dr-grpo"]
Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(("convention", "epsilon"), [("verl", 1e-6), ("openrlhf", 1e-9), ("trl", 1e-4)])
def test_grpo_by_hand(device_type: str, convention: Convention, epsilon: float) -> None:
    result = grpo(REWARDS_R.to(device_type), GROUP_R.to(device_type), convention=convention)
    expected = (REWARDS_R - MEAN_R) / (STD_R + epsilon)
    if convention == "trl":
        expected[-1] = 0
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert result.device.type == device_type


def test_the_conventions_differ_by_their_epsilon_in_a_narrow_group() -> None:
    # Rewards 0 and 2e-4: deviations of 1e-4, standard deviation 1e-4 sqrt(2).
    rewards_R, group_R, std = torch.tensor([0.0, 2e-4]), torch.zeros(2), 1e-4 * math.sqrt(2)
    for convention, epsilon in (("verl", 1e-6), ("openrlhf", 1e-9), ("trl", 1e-4)):
        result = grpo(rewards_R, group_R, convention=convention)  # type: ignore[arg-type]
        assert result[1].item() == pytest.approx(1e-4 / (std + epsilon), rel=1e-6)


def test_dr_grpo_by_hand() -> None:
    torch.testing.assert_close(grpo(REWARDS_R, GROUP_R, scale_by_std=False), REWARDS_R - MEAN_R)


def test_rloo_is_the_distance_from_the_others(device_type: str) -> None:
    # Group 7: 1 - (4 + 2)/2 = -2, 4 - (1 + 2)/2 = 2.5, 2 - (1 + 4)/2 = -0.5.
    # Group 3: 0 - (0 + 1)/2 = -0.5 twice, 1 - 0 = 1. Alone: 5.
    result = rloo(REWARDS_R.to(device_type), GROUP_R.to(device_type))
    expected = torch.tensor([-2.0, -0.5, 2.5, -0.5, 1.0, -0.5, 5.0])
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_reinforce_pp_baseline_by_hand() -> None:
    torch.testing.assert_close(reinforce_pp_baseline(REWARDS_R, GROUP_R), REWARDS_R - MEAN_R)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_a_trajectory_without_company_keeps_its_reward(estimator: Estimator) -> None:
    result = estimator(torch.tensor([3.0, -2.0]), torch.tensor([0, 1]))
    # GRPO divides by 1 + 1e-6.
    torch.testing.assert_close(result, torch.tensor([3.0, -2.0]), rtol=2e-6, atol=0)


def test_a_trajectory_without_company_where_the_convention_is_0() -> None:
    reward_R, group_R = torch.tensor([3.0]), torch.tensor([0])
    assert grpo(reward_R, group_R, convention="trl").item() == 0
    assert rloo(reward_R, group_R, convention="trl").item() == 0
    assert reinforce_pp_baseline(reward_R, group_R, convention="openrlhf").item() == 0


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_advantages_of_a_group_sum_to_0(estimator: Estimator) -> None:
    rewards_R, group_R = numbers(0, 64), torch.arange(64) % 8
    result = estimator(rewards_R, group_R)
    for group in range(8):
        assert result[group_R == group].sum().item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
@pytest.mark.parametrize("reward", [0.1, -3.3, 0.0])
def test_equal_rewards_teach_exactly_nothing(estimator: Estimator, reward: float) -> None:
    result = estimator(torch.full((24,), reward), torch.arange(24) % 3)
    assert result.tolist() == [0.0] * 24


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_order_does_not_matter(estimator: Estimator) -> None:
    rewards_R, group_R = numbers(0, 64), torch.arange(64) % 8
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        estimator(rewards_R[order], group_R[order]),
        estimator(rewards_R, group_R)[order],
        rtol=1e-7,
        atol=1e-7,
    )


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_no_trajectories_and_half_precision(estimator: Estimator) -> None:
    assert estimator(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    halves_R = REWARDS_R.bfloat16()
    assert estimator(halves_R, GROUP_R).dtype == torch.float32
    assert torch.equal(estimator(halves_R, GROUP_R), estimator(halves_R.float(), GROUP_R))
