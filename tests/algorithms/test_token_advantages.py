from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from steps import LENGTHS, MASK, cut, numbers, whole

from isotrain.algorithms.advantages.gae import gae
from isotrain.algorithms.advantages.reinforce_pp import reinforce_pp
from isotrain.algorithms.advantages.remax import remax

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
