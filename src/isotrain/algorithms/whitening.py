"""Whitening over a whole batch: moments of each part, combined, applied to each part.

N: tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

from isotrain.algorithms.segments import widen

Convention = Literal["verl", "openrlhf"]


class Moments(NamedTuple):
    """Plain sums, so that adding them up over the ranks gives the moments of the whole batch.

    In float64, which leaves nine digits for the variance even where the mean is a thousand times the spread.
    """

    number: float
    total: float
    squares: float

    @property
    def mean(self) -> float:
        return self.total / self.number if self.number else 0.0

    def variance(self, *, unbiased: bool = True) -> float:
        """0 for fewer than two values, of which no spread is known."""
        if self.number < 2:
            return 0.0
        deviations = max(self.squares - self.total * self.mean, 0.0)
        return deviations / (self.number - 1 if unbiased else self.number)


def moments(values_N: torch.Tensor, mask_N: torch.Tensor) -> Moments:
    """The moments of the values under the mask, summed on the host: not every device has float64."""
    values = values_N[mask_N].detach().cpu().double()
    return Moments(float(len(values)), values.sum().item(), values.square().sum().item())


def combine(parts: Iterable[Moments]) -> Moments:
    """The moments of all parts together."""
    return Moments(*(math.fsum(column) for column in zip(*parts, strict=True)))


def whitened(
    values_N: torch.Tensor, mask_N: torch.Tensor, of: Moments, *, convention: Convention = "verl"
) -> torch.Tensor:
    """The values with the mean and scale of `of` taken out; 0 outside the mask."""
    if convention == "openrlhf":
        scale = max(of.variance(unbiased=False), 1e-8) ** -0.5
    else:
        scale = (of.variance() + 1e-8) ** -0.5
    return torch.where(mask_N, (widen(values_N) - of.mean) * scale, 0.0)


def whiten(values_N: torch.Tensor, mask_N: torch.Tensor, *, convention: Convention = "verl") -> torch.Tensor:
    """Whitening where the whole batch is in one place."""
    return whitened(values_N, mask_N, moments(values_N, mask_N), convention=convention)
