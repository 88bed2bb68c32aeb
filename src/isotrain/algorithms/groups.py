"""Statistics of the trajectories of the same prompt.

R: trajectories of all prompts, in any order. P: prompts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Convention = Literal["verl", "openrlhf", "trl"]


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
