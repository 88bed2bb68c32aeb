"""Advantage estimators, and whitening over a whole batch.

P: prompts, R: trajectories of all prompts in any order, N: their response tokens, M: those of them that the
policy wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from isotrain.algorithms.segments import discounted_sums, following, spread, widen, written

Convention = Literal["verl", "openrlhf"]
GroupConvention = Literal["verl", "openrlhf", "trl"]


class GroupStatistics(NamedTuple):
    """Size, mean and unbiased standard deviation of each trajectory's own group; mean 0, std 1 if alone."""

    size_R: torch.Tensor
    mean_R: torch.Tensor
    std_R: torch.Tensor


def group_statistics(rewards_R: torch.Tensor, group_R: torch.Tensor) -> GroupStatistics:
    """In float64 on the host: rewards are few, and equal ones must differ from their mean by exactly 0.

    In float32 eight rewards of 0.1 differ from their mean by rounding, which a division by the equally small
    standard deviation would make an advantage.
    """
    rewards = rewards_R.detach().cpu().double()
    _, index_R = torch.unique(group_R.cpu(), return_inverse=True)
    size_P = torch.bincount(index_R).double()
    alone_P = size_P == 1
    mean_P = rewards.new_zeros(len(size_P)).index_add(0, index_R, rewards) / size_P
    squares_P = torch.zeros_like(mean_P).index_add(0, index_R, (rewards - mean_P[index_R]).square())
    std_P = (squares_P / (size_P - 1).clamp(min=1)).sqrt()
    mean_P, std_P = mean_P.masked_fill(alone_P, 0.0), std_P.masked_fill(alone_P, 1.0)
    return GroupStatistics(size_P[index_R], mean_P[index_R], std_P[index_R])


def as_rewards(values_R: torch.Tensor, rewards_R: torch.Tensor) -> torch.Tensor:
    """Back on the rewards' device, in their type but at least float32."""
    return values_R.to(rewards_R.device, torch.promote_types(rewards_R.dtype, torch.float32))


# Added to the standard deviation. It is what a group of almost equal rewards is measured by.
STD_EPSILON: dict[GroupConvention, float] = {"verl": 1e-6, "openrlhf": 1e-9, "trl": 1e-4}


def grpo(
    rewards_R: torch.Tensor,
    group_R: torch.Tensor,
    *,
    scale_by_std: bool = True,
    convention: GroupConvention = "verl",
) -> torch.Tensor:
    """GRPO (arXiv:2402.03300): `(R - mean) / (std + eps)`.

    Without `scale_by_std` it is Dr. GRPO's `R - mean` (arXiv:2503.20783).

    A trajectory that is alone in its group keeps its reward; in TRL its advantage is 0.
    """
    size_R, mean_R, std_R = group_statistics(rewards_R, group_R)
    advantages_R = rewards_R.detach().cpu().double() - mean_R
    if scale_by_std:
        advantages_R = advantages_R / (std_R + STD_EPSILON[convention])
    if convention == "trl":
        advantages_R = advantages_R.masked_fill(size_R == 1, 0.0)
    return as_rewards(advantages_R, rewards_R)


def rloo(
    rewards_R: torch.Tensor, group_R: torch.Tensor, *, convention: GroupConvention = "verl"
) -> torch.Tensor:
    """RLOO (arXiv:2402.14740): `n/(n-1) (R - mean)`, the reward minus the mean of the n - 1 others.

    A trajectory that is alone in its group keeps its reward; in TRL its advantage is 0.
    """
    size_R, mean_R, _ = group_statistics(rewards_R, group_R)
    centred_R = rewards_R.detach().cpu().double() - mean_R
    advantages_R = centred_R * size_R / (size_R - 1).clamp(min=1)
    if convention == "trl":
        advantages_R = advantages_R.masked_fill(size_R == 1, 0.0)
    return as_rewards(advantages_R, rewards_R)


def reinforce_pp(
    rewards_N: torch.Tensor,
    mask_N: torch.Tensor,
    lengths: Sequence[int],
    *,
    gamma: float = 1.0,
    convention: Convention = "verl",
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ (arXiv:2501.03262): returns `G_t = r_t + gamma G_{t+1}`, also as advantages to be whitened.

    Tokens that the policy did not write are passed over: their rewards do not count, and the discount does
    not grow on them. In OpenRLHF it does.
    """
    rewards_N = torch.where(mask_N, widen(rewards_N.detach()), 0.0)
    if convention == "openrlhf":
        returns_N = torch.where(mask_N, discounted_sums(rewards_N, lengths, gamma), 0.0)
        return returns_N, returns_N
    at_M, written_lengths = written(mask_N, lengths)
    returns_N = torch.zeros_like(rewards_N)
    returns_N[at_M] = discounted_sums(rewards_N[at_M], written_lengths, gamma)
    return returns_N, returns_N


def reinforce_pp_baseline(
    rewards_R: torch.Tensor, group_R: torch.Tensor, *, convention: Convention = "verl"
) -> torch.Tensor:
    """REINFORCE++ with a group baseline: `R - mean`, to be spread over the tokens and whitened.

    A trajectory that is alone in its group keeps its reward; in OpenRLHF it has 0 before the whitening.
    """
    size_R, mean_R, _ = group_statistics(rewards_R, group_R)
    advantages_R = rewards_R.detach().cpu().double() - mean_R
    if convention == "openrlhf":
        advantages_R = advantages_R.masked_fill(size_R == 1, 0.0)
    return as_rewards(advantages_R, rewards_R)


def remax(
    rewards_N: torch.Tensor, mask_N: torch.Tensor, lengths: Sequence[int], greedy_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """ReMax (arXiv:2310.10505): undiscounted returns minus the greedy response's `greedy_R`; and the returns.

    Where the greedy response has no score, NaN, there is nothing to compare with: the advantages are 0.
    """
    _, returns_N = reinforce_pp(rewards_N, mask_N, lengths)
    baseline_N = spread(widen(greedy_R.to(returns_N.device)), lengths)
    compared_N = mask_N & ~baseline_N.isnan()
    return torch.where(compared_N, returns_N - baseline_N, 0.0), returns_N


def gae(
    rewards_N: torch.Tensor,
    mask_N: torch.Tensor,
    lengths: Sequence[int],
    values_N: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    convention: Convention = "verl",
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE (arXiv:1506.02438): advantages still to be whitened, and returns `A + V` that the critic learns.

    `d_t = r_t + gamma V_{t+1} - V_t` and `A_t = d_t + gamma lam A_{t+1}`, where t + 1 is the next token that
    the policy wrote: V and A are carried through what tools and environments wrote. OpenRLHF sets V and r to
    0 there instead, and goes through these tokens one by one. The results are 0 there in both conventions.
    """
    rewards_N = torch.where(mask_N, widen(rewards_N.detach()), 0.0)
    values_N = torch.where(mask_N, widen(values_N.detach()), 0.0)
    if convention == "openrlhf":
        advantages_N = torch.where(mask_N, _recursion(rewards_N, values_N, lengths, gamma, lam), 0.0)
    else:
        at_M, written_lengths = written(mask_N, lengths)
        advantages_N = torch.zeros_like(values_N)
        advantages_N[at_M] = _recursion(rewards_N[at_M], values_N[at_M], written_lengths, gamma, lam)
    return advantages_N, advantages_N + values_N


def _recursion(
    rewards_M: torch.Tensor, values_M: torch.Tensor, lengths: Sequence[int], gamma: float, lam: float
) -> torch.Tensor:
    errors_M = rewards_M + gamma * following(values_M, lengths) - values_M
    return discounted_sums(errors_M, lengths, gamma * lam)


@dataclass(frozen=True)
class Estimator:
    """An estimator, and what a loop must know to call it without knowing its name."""

    function: Callable[..., Any]
    """Per trajectory: `(rewards_R, group_R) -> advantages_R`, over the groups of the whole batch.
    Per token: `(rewards_N, mask_N, lengths, *needs) -> (advantages_N, returns_N)`, over any trajectories."""
    per: Literal["trajectory", "token"]
    needs: tuple[str, ...] = ()
    """Further arguments: the critic's `values_N`, or `greedy_R`, rewards of greedy responses."""
    whiten: bool = False
    """Whether the advantages are then whitened over the tokens of the whole batch."""


# `algorithm.name` to its estimator.
ADVANTAGES = {
    "ppo": Estimator(gae, per="token", needs=("values_N",), whiten=True),
    "grpo": Estimator(grpo, per="trajectory"),
    "rloo": Estimator(rloo, per="trajectory"),
    "reinforce++": Estimator(reinforce_pp, per="token", whiten=True),
    "reinforce++-baseline": Estimator(reinforce_pp_baseline, per="trajectory", whiten=True),
    "remax": Estimator(remax, per="token", needs=("greedy_R",)),
}


class Moments(NamedTuple):
    """Plain sums, so that adding them up over the ranks gives the moments of the whole batch.

    In float64, which leaves nine digits for the variance even where the mean is a thousand times the spread.
    """

    number: float
    total: float
    squares: float

    @property
    def mean(self) -> float:
        return self.total / self.number if self.number else 0.0

    def variance(self, *, unbiased: bool = True) -> float:
        """0 for fewer than two values, of which no spread is known."""
        if self.number < 2:
            return 0.0
        deviations = max(self.squares - self.total * self.mean, 0.0)
        return deviations / (self.number - 1 if unbiased else self.number)


def moments(values_N: torch.Tensor, mask_N: torch.Tensor) -> Moments:
    """The moments of the values under the mask, summed on the host: not every device has float64."""
    values = values_N[mask_N].detach().cpu().double()
    return Moments(float(len(values)), values.sum().item(), values.square().sum().item())


def combine(parts: Iterable[Moments]) -> Moments:
    """The moments of all parts together."""
    return Moments(*(math.fsum(column) for column in zip(*parts, strict=True)))


def whitened(
    values_N: torch.Tensor, mask_N: torch.Tensor, of: Moments, *, convention: Convention = "verl"
) -> torch.Tensor:
    """The values with the mean and scale of `of` taken out; 0 outside the mask."""
    if convention == "openrlhf":
        scale = max(of.variance(unbiased=False), 1e-8) ** -0.5
    else:
        scale = (of.variance() + 1e-8) ** -0.5
    return torch.where(mask_N, (widen(values_N) - of.mean) * scale, 0.0)


def whiten(values_N: torch.Tensor, mask_N: torch.Tensor, *, convention: Convention = "verl") -> torch.Tensor:
    """Whitening where the whole batch is in one place."""
    return whitened(values_N, mask_N, moments(values_N, mask_N), convention=convention)
