"""GRPO: a reward's distance from its group's mean, in standard deviations (arXiv:2402.03300).

R: trajectories.
"""

from __future__ import annotations

import torch

from isotrain.algorithms.groups import Convention, as_rewards, group_statistics

# Added to the standard deviation. It is what a group of almost equal rewards is measured by.
STD_EPSILON: dict[Convention, float] = {"verl": 1e-6, "openrlhf": 1e-9, "trl": 1e-4}


def grpo(
    rewards_R: torch.Tensor,
    group_R: torch.Tensor,
    *,
    scale_by_std: bool = True,
    convention: Convention = "verl",
) -> torch.Tensor:
    """`(R - mean) / (std + eps)`; without `scale_by_std` it is Dr. GRPO's `R - mean` (arXiv:2503.20783).

    A trajectory that is alone in its group keeps its reward; in TRL its advantage is 0.
    """
    size_R, mean_R, std_R = group_statistics(rewards_R, group_R)
    advantages_R = rewards_R.detach().cpu().double() - mean_R
    if scale_by_std:
        advantages_R = advantages_R / (std_R + STD_EPSILON[convention])
    if convention == "trl":
        advantages_R = advantages_R.masked_fill(size_R == 1, 0.0)
    return as_rewards(advantages_R, rewards_R)
