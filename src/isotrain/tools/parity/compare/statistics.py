"""How far two curves over the same steps are apart, in the ways that people and publications use.

S: steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isotrain.tools.parity.run import Numbers

# A step is where curves part if they are apart by more than this share of a typical change, and stay so.
PART_SHARE, PART_OF = 0.1, 5


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Apart:
    """A candidate's curve against a reference's; errors are in the metric's own unit."""

    steps: int
    mean_absolute: float
    mean_relative: float | None
    """Mean of `|a - b| / |b|`; None where the reference is 0 somewhere."""
    first: float
    """Signed, at the first step: before any update, there is only rounding."""
    largest: float
    largest_at: int
    signed_mean: float
    parts_at: int | None
    """The first step from which the curves stay apart; None if they do not."""
    change_correlation: float | None
    """Correlation of the changes from step to step; None where one of the curves does not change."""
    share_of_flat: float | None
    """The mean error as a share of that of a flat line at the reference's mean; None for a flat reference."""


def apart(steps_S: npt.NDArray[np.int64], reference_S: Numbers, candidate_S: Numbers) -> Apart:
    """Curves of equal length, at least one step, all values finite."""
    error_S = candidate_S - reference_S
    size_S = np.abs(error_S)
    flat = float(np.mean(np.abs(reference_S - reference_S.mean())))
    nonzero = bool(np.all(reference_S != 0))
    largest = int(np.argmax(size_S))
    return Apart(
        steps=len(steps_S),
        mean_absolute=float(size_S.mean()),
        mean_relative=float(np.mean(size_S / np.abs(reference_S))) if nonzero else None,
        first=float(error_S[0]),
        largest=float(size_S[largest]),
        largest_at=int(steps_S[largest]),
        signed_mean=float(error_S.mean()),
        parts_at=_parts_at(steps_S, reference_S, size_S),
        change_correlation=correlation(np.diff(reference_S), np.diff(candidate_S)),
        share_of_flat=float(size_S.mean()) / flat if flat else None,
    )


def correlation(a_S: Numbers, b_S: Numbers) -> float | None:
    """Pearson's; None where one side does not vary by more than rounding."""
    if len(a_S) < 2:
        return None
    centred = [x_S - x_S.mean() for x_S in (a_S, b_S)]
    sizes = [math.sqrt(float(x_S @ x_S)) for x_S in centred]
    if any(size <= 1e-12 * math.sqrt(float(x_S @ x_S)) for size, x_S in zip(sizes, (a_S, b_S), strict=True)):
        return None
    return float(centred[0] @ centred[1]) / (sizes[0] * sizes[1])


def _parts_at(steps_S: npt.NDArray[np.int64], reference_S: Numbers, size_S: Numbers) -> int | None:
    """One step may be far off and the next close again; curves part where most of the next ones are far."""
    if len(steps_S) < 2:
        return None
    typical = float(np.median(np.abs(np.diff(reference_S))))
    far_S = size_S > PART_SHARE * typical
    counts = np.convolve(far_S, np.ones(min(PART_OF, len(far_S))), "full")[-len(far_S) :]
    left = np.minimum(PART_OF, len(far_S) - np.arange(len(far_S)))
    parted = np.flatnonzero(far_S & (counts * 2 > left))
    return int(steps_S[parted[0]]) if len(parted) else None


@dataclass(frozen=True)
class Throughput:
    """A candidate's throughput as a multiple of the reference's, and the other way round."""

    ratio: float
    inverse: float


def throughput(reference_S: Numbers, candidate_S: Numbers) -> Throughput:
    ratio = float(candidate_S.mean() / reference_S.mean())
    return Throughput(ratio, 1 / ratio)
