"""Trajectories laid one after the other without padding: sums, spreads and discounted sums within each.

R: trajectories, N: their response tokens, M: those of them that the policy wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch


def widen(values: torch.Tensor) -> torch.Tensor:
    """At least float32: differences of half-precision log-probs lose what losses are made of."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def assert_aligned(*columns: torch.Tensor | None) -> None:
    """Values of the same items must be equally many: torch would stretch one value over all items, or
    reduce them to none where there is no value.
    """
    shapes = [tuple(column.shape) for column in columns if column is not None]
    assert all(shape == shapes[0] for shape in shapes), f"values of the same items have shapes {shapes}"


def sums(values_N: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The sum over each trajectory's tokens.

    Each is a sum of its own: a trajectory's sum is bitwise identical whatever it is packed with, which
    scattered additions do not promise on every device.
    """
    if not lengths:
        return values_N[:0]  # which still bears a gradient: every rank must go through the backward pass
    return torch.stack([part.sum() for part in values_N.split(list(lengths))])


def spread(values_R: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Each trajectory's value, repeated for each of its tokens."""
    # The output size is known here: the device need not be asked for it.
    repeats_R = torch.tensor(lengths, dtype=torch.int64, device=values_R.device)
    return values_R.repeat_interleave(repeats_R, output_size=sum(lengths))


def written(mask_N: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """Positions of the tokens that the policy wrote, and how many each trajectory has."""
    return mask_N.nonzero().squeeze(1), sums(mask_N.long(), lengths).tolist()


def following(values_M: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The value of the next token of the same trajectory; 0 after the last."""
    next_M = torch.zeros_like(values_M)
    next_M[:-1] = values_M[1:]
    last = [end - 1 for end, length in zip(accumulate(lengths), lengths, strict=True) if length]
    next_M[torch.tensor(last, dtype=torch.int64, device=values_M.device)] = 0
    return next_M


def discounted_sums(values_M: torch.Tensor, lengths: Sequence[int], discount: float) -> torch.Tensor:
    """`x_t = value_t + discount x_{t+1}` within each trajectory, last token first, all of them at once."""
    ends = list(accumulate(lengths))
    # Longest first: those that still have a token `step` places before their last are then the first ones.
    order = sorted(range(len(lengths)), key=lambda r: -lengths[r])
    last_R = torch.tensor([ends[r] - 1 for r in order], dtype=torch.int64, device=values_M.device)
    sums_M = values_M.clone()
    alive = len(order)
    for step in range(1, max(lengths, default=0)):
        while lengths[order[alive - 1]] <= step:
            alive -= 1
        at = last_R[:alive] - step
        sums_M[at] += discount * sums_M[at + 1]
    return sums_M
