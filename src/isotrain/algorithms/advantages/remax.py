"""ReMax: the return minus the return of the greedy response to the same prompt (arXiv:2310.10505).

R: trajectories, N: their response tokens, M: those of them that the policy wrote.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isotrain.algorithms.advantages.reinforce_pp import reinforce_pp
from isotrain.algorithms.segments import spread, widen


def remax(
    rewards_N: torch.Tensor, mask_N: torch.Tensor, lengths: Sequence[int], greedy_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Undiscounted rewards still to come, minus `greedy_R`; and these returns.

    Where the greedy response has no score, NaN, there is nothing to compare with: the advantages are 0.
    """
    _, returns_N = reinforce_pp(rewards_N, mask_N, lengths)
    baseline_N = spread(widen(greedy_R.to(returns_N.device)), lengths)
    compared_N = mask_N & ~baseline_N.isnan()
    return torch.where(compared_N, returns_N - baseline_N, 0.0), returns_N
