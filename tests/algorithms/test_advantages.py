from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from steps import LENGTHS, MASK, cut, numbers, whole

from isotrain.algorithms.advantages import (
    Convention,
    GroupConvention,
    Moments,
    combine,
    gae,
    grpo,
    moments,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    whiten,
    whitened,
)

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
def test_grpo_by_hand(device_type: str, convention: GroupConvention, epsilon: float) -> None:
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


MASK_N = torch.tensor(MASK).bool()
Pair = tuple[torch.Tensor, torch.Tensor]


def bools(*values: int) -> torch.Tensor:
    return torch.tensor(values).bool()


def test_gae_by_hand(device_type: str) -> None:
    # gamma 1/2, lam 1/2, reward 8 at the end, values 2, 4, 6:
    # d = (0 + 4/2 - 2, 0 + 6/2 - 4, 8 - 6) = (0, -1, 2)
    # A = (0 + -0.5/4, -1 + 2/4, 2) = (-0.125, -0.5, 2)
    rewards_N = torch.tensor([0.0, 0.0, 8.0], device=device_type)
    values_N = torch.tensor([2.0, 4.0, 6.0], device=device_type)
    mask_N = torch.ones(3, dtype=torch.bool, device=device_type)
    advantages_N, returns_N = gae(rewards_N, mask_N, [3], values_N, gamma=0.5, lam=0.5)
    assert advantages_N.tolist() == [-0.125, -0.5, 2.0]
    assert returns_N.tolist() == [1.875, 3.5, 8.0]


def test_gae_carries_value_and_advantage_through_tool_tokens(device_type: str) -> None:
    # The same trajectory with two tool tokens in it: nothing changes for the tokens of the policy, whatever
    # value the critic gave to the tool's.
    rewards_N = torch.tensor([0.0, 7.0, 7.0, 0.0, 8.0, 7.0], device=device_type)
    values_N = torch.tensor([2.0, 9.0, 9.0, 4.0, 6.0, 9.0], device=device_type)
    mask_N = bools(1, 0, 0, 1, 1, 0).to(device_type)
    advantages_N, returns_N = gae(rewards_N, mask_N, [6], values_N, gamma=0.5, lam=0.5)
    assert advantages_N.tolist() == [-0.125, 0.0, 0.0, -0.5, 2.0, 0.0]
    assert returns_N.tolist() == [1.875, 0.0, 0.0, 3.5, 8.0, 0.0]


def test_gae_in_the_convention_of_openrlhf() -> None:
    # Values and rewards 2, 0 (tool), 6 and 0, 0, 8; gamma 1/2, lam 1/2:
    # d = (0 + 0 - 2, 0 + 6/2 - 0, 8 - 6) = (-2, 3, 2); A = (-2 + 3.5/4, 3 + 2/4, 2) = (-1.125, 3.5, 2)
    rewards_N, values_N = torch.tensor([0.0, 7.0, 8.0]), torch.tensor([2.0, 9.0, 6.0])
    mask_N = bools(1, 0, 1)
    advantages_N, returns_N = gae(rewards_N, mask_N, [3], values_N, gamma=0.5, lam=0.5, convention="openrlhf")
    assert advantages_N.tolist() == [-1.125, 0.0, 2.0]
    assert returns_N.tolist() == [0.875, 0.0, 8.0]


def test_conventions_agree_where_the_policy_wrote_everything() -> None:
    rewards_N, values_N, all_N = numbers(0), numbers(1), torch.ones(10, dtype=torch.bool)
    for options in ({"gamma": 0.9, "lam": 0.8}, {}):
        verl = gae(rewards_N, all_N, LENGTHS, values_N, **options)
        openrlhf = gae(rewards_N, all_N, LENGTHS, values_N, convention="openrlhf", **options)
        assert torch.equal(verl[0], openrlhf[0]) and torch.equal(verl[1], openrlhf[1])


def test_gae_with_lam_1_is_the_return_minus_the_value() -> None:
    rewards_N, values_N = numbers(0), numbers(1)
    advantages_N, returns_N = gae(rewards_N, MASK_N, LENGTHS, values_N)
    _, expected_N = reinforce_pp(rewards_N, MASK_N, LENGTHS)
    torch.testing.assert_close(returns_N, expected_N)
    torch.testing.assert_close(advantages_N, torch.where(MASK_N, expected_N - values_N, 0.0))


def test_gae_with_lam_0_is_the_one_step_error() -> None:
    rewards_N, values_N = numbers(0, 4), numbers(1, 4)
    advantages_N, _ = gae(rewards_N, bools(1, 1, 1, 1), [3, 1], values_N, gamma=0.9, lam=0.0)
    next_N = torch.stack([values_N[1], values_N[2], torch.tensor(0.0), torch.tensor(0.0)])
    torch.testing.assert_close(advantages_N, rewards_N + 0.9 * next_N - values_N)


def test_reinforce_pp_by_hand(device_type: str) -> None:
    # gamma 1/2, reward 1 on the first and 8 on the last written token: G = (1 + 4/2, 0 + 8/2, 8) = (3, 4, 8).
    rewards_N = torch.tensor([1.0, 0.0, 8.0, 2.0], device=device_type)
    advantages_N, returns_N = reinforce_pp(rewards_N, bools(1, 1, 1, 1).to(device_type), [3, 1], gamma=0.5)
    assert advantages_N.tolist() == returns_N.tolist() == [3.0, 4.0, 8.0, 2.0]


def test_reinforce_pp_with_tool_tokens() -> None:
    rewards_N, mask_N = torch.tensor([1.0, 9.0, 9.0, 8.0]), bools(1, 0, 0, 1)
    # Passed over: 1 + 8/2. Step by step: 1 + 8/8.
    assert reinforce_pp(rewards_N, mask_N, [4], gamma=0.5)[1].tolist() == [5.0, 0.0, 0.0, 8.0]
    stepwise = reinforce_pp(rewards_N, mask_N, [4], gamma=0.5, convention="openrlhf")
    assert stepwise[1].tolist() == [2.0, 0.0, 0.0, 8.0]


def test_remax_by_hand(device_type: str) -> None:
    # Returns (1 + 4, 4) and (2); greedy responses earned 3 and 2.
    rewards_N = torch.tensor([1.0, 9.0, 4.0, 2.0], device=device_type)
    mask_N, greedy_R = bools(1, 0, 1, 1).to(device_type), torch.tensor([3.0, 2.0], device=device_type)
    advantages_N, returns_N = remax(rewards_N, mask_N, [3, 1], greedy_R)
    assert advantages_N.tolist() == [2.0, 0.0, 1.0, 0.0]
    assert returns_N.tolist() == [5.0, 0.0, 4.0, 2.0]


def estimate_gae(
    rewards_N: torch.Tensor, mask_N: torch.Tensor, lengths: list[int], at_N: torch.Tensor
) -> Pair:
    return gae(rewards_N, mask_N, lengths, numbers(1)[at_N], gamma=0.9, lam=0.8)


def estimate_pp(
    rewards_N: torch.Tensor, mask_N: torch.Tensor, lengths: list[int], at_N: torch.Tensor
) -> Pair:
    return reinforce_pp(rewards_N, mask_N, lengths, gamma=0.9)


ESTIMATES = pytest.mark.parametrize("estimate", [estimate_gae, estimate_pp])


@ESTIMATES
@pytest.mark.parametrize("order", [[[0], [1], [2]], [[2, 0], [], [1]], [[2, 1, 0]]])
def test_a_trajectory_does_not_see_its_neighbours(
    estimate: Callable[..., Pair], order: list[list[int]]
) -> None:
    rewards_N = numbers(0)
    together = estimate(rewards_N, MASK_N, list(LENGTHS), torch.arange(10))
    for part, at_N in cut(whole(LENGTHS, MASK), order):
        alone = estimate(rewards_N[at_N], part.mask_N, list(part.lengths), at_N)
        assert torch.equal(alone[0], together[0][at_N]) and torch.equal(alone[1], together[1][at_N])


@ESTIMATES
def test_what_is_outside_the_mask_cannot_be_seen(estimate: Callable[..., Pair]) -> None:
    rewards_N = numbers(0)
    broken_N = torch.where(MASK_N, rewards_N, torch.nan)
    clean, spoilt = (estimate(r, MASK_N, list(LENGTHS), torch.arange(10)) for r in (rewards_N, broken_N))
    assert torch.equal(clean[0], spoilt[0]) and torch.equal(clean[1], spoilt[1])
    assert not clean[0][~MASK_N].any() and not clean[1][~MASK_N].any()


@ESTIMATES
def test_nothing_written_and_half_precision(estimate: Callable[..., Pair]) -> None:
    none_N, at_N = torch.zeros(10, dtype=torch.bool), torch.arange(10)
    assert not estimate(numbers(0), none_N, list(LENGTHS), at_N)[0].any()
    half_N = numbers(0).bfloat16()
    result = estimate(half_N, MASK_N, list(LENGTHS), at_N)[0]
    assert result.dtype == torch.float32
    assert torch.equal(result, estimate(half_N.float(), MASK_N, list(LENGTHS), at_N)[0])


def test_lengths_of_1() -> None:
    rewards_N, values_N = numbers(0, 3), numbers(1, 3)
    advantages_N, returns_N = gae(rewards_N, bools(1, 1, 1), [1, 1, 1], values_N, gamma=0.9, lam=0.9)
    torch.testing.assert_close(advantages_N, rewards_N - values_N)
    torch.testing.assert_close(returns_N, rewards_N)


def test_remax_without_a_baseline_teaches_nothing(device_type: str) -> None:
    rewards_N = torch.tensor([0.0, 1.0, 0.0, 3.0], device=device_type)
    mask_N = torch.ones(4, dtype=torch.bool, device=device_type)
    greedy_R = torch.tensor([float("nan"), 0.5], device=device_type)
    advantages_N, returns_N = remax(rewards_N, mask_N, [2, 2], greedy_R)
    assert advantages_N.tolist() == [0.0, 0.0, 2.5, 2.5]
    assert returns_N.tolist() == [1.0, 1.0, 3.0, 3.0]


SPARSE_N = torch.tensor([1, 1, 0, 1, 1]).bool()


@pytest.mark.parametrize(
    ("convention", "scale"),
    [
        # Of 1, 2, 4, 5 the mean is 3 and the squared deviations sum to 4 + 1 + 1 + 4 = 10.
        ("verl", 1 / math.sqrt(10 / 3 + 1e-8)),
        ("openrlhf", 1 / math.sqrt(10 / 4)),
    ],
)
def test_whitening_conventions_by_hand(device_type: str, convention: Convention, scale: float) -> None:
    values_N = torch.tensor([1.0, 2.0, 99.0, 4.0, 5.0], device=device_type)
    result = whiten(values_N, SPARSE_N.to(device_type), convention=convention)
    expected = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]) * scale
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-6, atol=0)
    assert result.device.type == device_type


def test_parts_have_the_moments_of_the_whole() -> None:
    values_N, mask_N = numbers(0, 1000), numbers(1, 1000) > 0
    together = moments(values_N, mask_N)
    parts = list(zip(values_N.split([300, 0, 700]), mask_N.split([300, 0, 700]), strict=True))
    combined = combine(moments(*part) for part in parts)
    assert combined == pytest.approx(together, rel=1e-14)
    split = torch.cat([whitened(*part, combined) for part in parts])
    torch.testing.assert_close(split, whiten(values_N, mask_N), rtol=1e-6, atol=1e-7)


def test_sums_over_ranks_are_moments() -> None:
    parts = [moments(numbers(seed, 5), SPARSE_N) for seed in (0, 1)]
    added = Moments(*(sum(column) for column in zip(*parts, strict=True)))
    assert added == pytest.approx(combine(parts))


def test_moments_equal_torch_at_a_large_mean() -> None:
    values_N = numbers(0, 4096) + 1000
    computed = moments(values_N, torch.ones(4096, dtype=torch.bool))
    assert computed.mean == pytest.approx(values_N.double().mean().item(), rel=1e-14)
    assert computed.variance() == pytest.approx(values_N.double().var().item(), rel=1e-9)
    assert computed.variance(unbiased=False) == pytest.approx(
        values_N.double().var(correction=0).item(), rel=1e-9
    )


def test_whitened_values_have_mean_0_and_variance_1_under_the_mask() -> None:
    values_N, mask_N = numbers(0, 500) * 3 + 2, numbers(1, 500) > -0.5
    result = whiten(values_N, mask_N)
    assert result[mask_N].mean().item() == pytest.approx(0, abs=1e-6)
    assert result[mask_N].var().item() == pytest.approx(1, rel=1e-5)
    assert not result[~mask_N].any()


@pytest.mark.parametrize("convention", ["verl", "openrlhf"])
@pytest.mark.parametrize(
    ("values", "mask"),
    [
        ([], []),
        ([5.0, math.nan], [0, 0]),
        ([5.0], [1]),
        ([0.1] * 7, [1] * 7),
    ],
    ids=["nothing", "nothing written", "one token", "all equal"],
)
def test_whitening_without_spread_is_0(convention: Convention, values: list[float], mask: list[int]) -> None:
    result = whiten(torch.tensor(values), torch.tensor(mask).bool(), convention=convention)
    assert result.tolist() == [0.0] * len(values)


def test_whitening_promotes_half_precision() -> None:
    values_N = numbers(0, 5).bfloat16()
    result = whiten(values_N, SPARSE_N)
    assert result.dtype == torch.float32
    assert torch.equal(result, whiten(values_N.float(), SPARSE_N))


def test_moments_of_nothing() -> None:
    nothing = moments(torch.ones(2), torch.zeros(2).bool())
    assert (nothing.number, nothing.mean, nothing.variance()) == (0.0, 0.0, 0.0)
