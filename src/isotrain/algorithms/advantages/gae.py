"""Generalised advantage estimation, the advantages of PPO (arXiv:1506.02438).

N: response tokens of all trajectories, M: those of them that the policy wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from isotrain.algorithms.segments import discounted_sums, following, widen, written


def gae(
    rewards_N: torch.Tensor,
    mask_N: torch.Tensor,
    lengths: Sequence[int],
    values_N: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    convention: Literal["verl", "openrlhf"] = "verl",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages that still have to be whitened, and the returns `A + V` that the critic learns.

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
