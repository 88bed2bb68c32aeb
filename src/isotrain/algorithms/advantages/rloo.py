"""RLOO: a reward minus the mean of the other rewards of its group (arXiv:2402.14740).

R: trajectories.
"""

from __future__ import annotations

import torch

from isotrain.algorithms.groups import Convention, as_rewards, group_statistics


def rloo(rewards_R: torch.Tensor, group_R: torch.Tensor, *, convention: Convention = "verl") -> torch.Tensor:
    """`n/(n-1) (R - mean)`, which is the reward minus the mean of the n - 1 others.

    A trajectory that is alone in its group keeps its reward; in TRL its advantage is 0.
    """
    size_R, mean_R, _ = group_statistics(rewards_R, group_R)
    centred_R = rewards_R.detach().cpu().double() - mean_R
    advantages_R = centred_R * size_R / (size_R - 1).clamp(min=1)
    if convention == "trl":
        advantages_R = advantages_R.masked_fill(size_R == 1, 0.0)
    return as_rewards(advantages_R, rewards_R)
