"""The critic: a loss clipped around its old values, the variance of returns that it explains.

N: response tokens of a micro-batch.
"""

from __future__ import annotations

import math

import torch

from isotrain.algorithms.advantages import Moments
from isotrain.algorithms.aggregation import AGGREGATIONS, Loss, LossNormalizer


def value_loss(
    values_N: torch.Tensor,
    old_values_N: torch.Tensor,
    returns_N: torch.Tensor,
    share: LossNormalizer,
    *,
    clip: float | None = 0.5,
    aggregation: str = "token-mean",
) -> Loss:
    """`max((v - R)^2, (v_clip - R)^2) / 2`, where `v_clip` is v kept within `clip` of the old value.

    The larger of the two: clipping holds a value back that moved far, and never makes a loss look smaller.
    """
    values_N = share.only(values_N)
    old_values_N, returns_N = share.only(old_values_N.detach()), share.only(returns_N.detach())
    squares_N = (values_N - returns_N).square()
    clipped_N = torch.zeros_like(share.mask_N)
    if clip is not None:
        held_N = torch.clamp(values_N, old_values_N - clip, old_values_N + clip)
        held_squares_N = (held_N - returns_N).square()
        clipped_N = held_squares_N > squares_N
        squares_N = torch.maximum(squares_N, held_squares_N)
    loss = AGGREGATIONS[aggregation](squares_N / 2, share)
    return loss, {"critic/vf_loss": loss.detach(), "critic/vf_clipfrac": share.mean(clipped_N)}


def explained_variance(returns: Moments, residuals: Moments) -> float:
    """`1 - var(R - V) / var(R)`: 1 for a perfect critic, 0 for one that knows the mean alone.

    Not a number for fewer than two tokens.
    """
    if returns.number < 2:
        return math.nan
    return 1 - residuals.variance() / (returns.variance() + 1e-5)
