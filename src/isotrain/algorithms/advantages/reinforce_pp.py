"""REINFORCE++: discounted returns, or rewards minus their group's mean, whitened (arXiv:2501.03262).

R: trajectories, N: their response tokens, M: those of them that the policy wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from isotrain.algorithms.groups import as_rewards, group_statistics
from isotrain.algorithms.segments import discounted_sums, widen, written


def reinforce_pp(
    rewards_N: torch.Tensor,
    mask_N: torch.Tensor,
    lengths: Sequence[int],
    *,
    gamma: float = 1.0,
    convention: Literal["verl", "openrlhf"] = "verl",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`G_t = r_t + gamma G_{t+1}`, as advantages that still have to be whitened, and as returns.

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
    rewards_R: torch.Tensor, group_R: torch.Tensor, *, convention: Literal["verl", "openrlhf"] = "verl"
) -> torch.Tensor:
    """`R - mean`, to be spread over the tokens and whitened.

    A trajectory that is alone in its group keeps its reward; in OpenRLHF it has 0 before the whitening.
    """
    size_R, mean_R, _ = group_statistics(rewards_R, group_R)
    advantages_R = rewards_R.detach().cpu().double() - mean_R
    if convention == "openrlhf":
        advantages_R = advantages_R.masked_fill(size_R == 1, 0.0)
    return as_rewards(advantages_R, rewards_R)
