"""From scores of trajectories to rewards of tokens; DAPO's reward shaping and filter (arXiv:2503.14476).

R: trajectories, N: their response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from isotrain.algorithms.segments import sums, widen, written


def token_rewards(
    scores_R: torch.Tensor,
    mask_N: torch.Tensor,
    lengths: Sequence[int],
    *,
    kl_N: torch.Tensor | None = None,
    kl_coefficient: float = 0.0,
    turn_rewards_N: torch.Tensor | None = None,
    earlier_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """The score on the last token that the policy wrote, minus `kl_coefficient kl` on each that it wrote.

    Parts of the score that were given for single turns are on their last tokens instead (`turn_rewards_N`),
    or on those of another sequence (`earlier_R`): all together are the score.

    The last written token, not the last one: what a tool answered at the very end earns nothing, and a
    reward there would be passed over. A trajectory in which the policy wrote nothing has no reward.
    """
    at_M, counts = written(mask_N, lengths)
    ends = accumulate(counts)
    last = [(r, end - 1) for r, (end, count) in enumerate(zip(ends, counts, strict=True)) if count]
    rows = torch.tensor([r for r, _ in last], dtype=torch.int64, device=mask_N.device)
    places = torch.tensor([place for _, place in last], dtype=torch.int64, device=mask_N.device)
    scores_R = widen(scores_R.detach()).to(mask_N.device)
    if turn_rewards_N is not None:
        assert earlier_R is not None
        turn_rewards_N = torch.where(mask_N, widen(turn_rewards_N), 0.0)
        scores_R = scores_R - sums(turn_rewards_N, lengths) - widen(earlier_R).to(mask_N.device)
    rewards_N = scores_R.new_zeros(len(mask_N))
    rewards_N[at_M[places]] = scores_R[rows]
    if turn_rewards_N is not None:
        rewards_N = rewards_N + turn_rewards_N
    if kl_N is not None:
        rewards_N = rewards_N - kl_coefficient * torch.where(mask_N, widen(kl_N.detach()), 0.0)
    return rewards_N


def informative(rewards_R: torch.Tensor, group_R: torch.Tensor) -> torch.Tensor:
    """DAPO's dynamic sampling: which trajectories belong to a group whose rewards differ.

    The others have advantage 0 all together. A trajectory that is alone in its group counts as informative:
    its advantage is its reward.
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
    """DAPO's overlong reward shaping: a penalty that grows with the last `buffer` tokens.

    0 up to `max_length - buffer` tokens, then falling linearly to `-factor` at `max_length`.
    """
    excess_R = torch.tensor(response_lengths, dtype=torch.float32) - (max_length - buffer)
    return -factor * (excess_R / buffer).clamp(0.0, 1.0)
