"""Steps for tests: one that is a single micro-batch, and the same one cut into several."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isotrain.algorithms.aggregation import LossNormalizer
from isotrain.algorithms.segments import sums


def whole(
    lengths: Sequence[int],
    mask: Sequence[int] | None = None,
    *,
    horizon: int | None = None,
    device: str = "cpu",
) -> LossNormalizer:
    """A step that is one micro-batch."""
    mask_N = torch.tensor([1] * sum(lengths) if mask is None else mask, device=device).bool()
    counts = sums(mask_N.long(), lengths)
    return LossNormalizer(mask_N, lengths, int(counts.sum()), int((counts > 0).sum()), horizon)


def cut(share: LossNormalizer, order: Sequence[Sequence[int]]) -> list[tuple[LossNormalizer, torch.Tensor]]:
    """The same step as several micro-batches: `order[k]` lists the trajectories of the k-th.

    With each comes where its tokens were before.
    """
    places = torch.arange(len(share.mask_N)).split(list(share.lengths))
    parts = []
    for trajectories in order:
        at_N = torch.cat([places[r] for r in trajectories] or [torch.zeros(0, dtype=torch.int64)])
        at_N = at_N.to(share.mask_N.device)
        lengths = [share.lengths[r] for r in trajectories]
        parts.append(
            (LossNormalizer(share.mask_N[at_N], lengths, share.tokens, share.sequences, share.horizon), at_N)
        )
    return parts


# Three trajectories, one with tool tokens in its middle, one that ends in a tool token, one of length 1.
LENGTHS = (5, 4, 1)
MASK = (1, 1, 0, 0, 1, 1, 1, 1, 0, 1)


def numbers(seed: int, count: int = sum(LENGTHS), device: str = "cpu") -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(device)
