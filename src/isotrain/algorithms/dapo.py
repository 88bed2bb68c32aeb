"""DAPO: dynamic sampling and overlong reward shaping (arXiv:2503.14476).

R: trajectories. DAPO's other parts are options elsewhere: clip-higher, token-mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def informative(rewards_R: torch.Tensor, group_R: torch.Tensor) -> torch.Tensor:
    """Which trajectories belong to a group whose rewards differ; the others have advantage 0 all together.

    A trajectory that is alone in its group counts as informative: its advantage is its reward.
    """
    rewards = rewards_R.detach().cpu()
    _, index_R, size_P = torch.unique(group_R.cpu(), return_inverse=True, return_counts=True)
    empty_P = rewards.new_zeros(len(size_P))
    least_P, most_P = (
        empty_P.scatter_reduce(0, index_R, rewards, extreme, include_self=False)
        for extreme in ("amin", "amax")
    )
    keep_R: torch.Tensor = ((least_P < most_P) | (size_P == 1))[index_R]
    return keep_R.to(rewards_R.device)


def overlong_penalty(
    response_lengths: Sequence[int], *, max_length: int, buffer: int, factor: float = 1.0
) -> torch.Tensor:
    """0 up to `max_length - buffer` tokens, then falling linearly to `-factor` at `max_length`."""
    excess_R = torch.tensor(response_lengths, dtype=torch.float32) - (max_length - buffer)
    return -factor * (excess_R / buffer).clamp(0.0, 1.0)
