"""Did the mismatch matter? What importance weights say of it, and what it goes together with.

N: tokens of a sequence, R: sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from isotrain.tools.mismatch.attribution import Array

# The default of `algorithm.rollout_correction.upper`.
UPPER = 2.0
# Below this share of samples, gradients have visibly more noise than their number says.
ENOUGH_SAMPLES = 0.9
SIGNIFICANT = 0.01
FEWEST_SEQUENCES = 8


@dataclass(frozen=True)
class Correlation:
    """Spearman's, over sequences, of the mean absolute difference; NaN where one of the two does not vary."""

    coefficient: float
    p: float

    @property
    def is_significant(self) -> bool:
        return self.p < SIGNIFICANT


@dataclass(frozen=True)
class Effect:
    token_samples: float
    """Effective sample size over the number of tokens: 1 without mismatch."""
    sequence_samples: float
    """The same for whole sequences, whose weight is the product over tokens."""
    spread: float
    """Standard deviation of the tokens' importance weights."""
    clipped: float
    """Share of tokens whose weight is above `UPPER` or below its inverse."""
    length: Correlation
    advantage: Correlation | None
    """None where no advantages were recorded."""

    @property
    def is_visible(self) -> bool:
        """Whether these sequences show an effect on the update."""
        correlated = self.advantage is not None and self.advantage.is_significant
        return min(self.token_samples, self.sequence_samples) < ENOUGH_SAMPLES or correlated


def effective(log_weights: Array) -> float:
    """`(sum w)^2 / (n sum w^2)`, without overflow."""
    if not len(log_weights):
        return math.nan
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def correlation(a: Array, b: Array) -> Correlation:
    if len(a) < FEWEST_SEQUENCES or np.ptp(a) == 0 or np.ptp(b) == 0:
        return Correlation(math.nan, math.nan)
    result = stats.spearmanr(a, b)
    return Correlation(float(result.statistic), float(result.pvalue))


def effect(differences: Sequence[Array], advantages_R: Array | None = None) -> Effect:
    """`differences` are `trainer - engine` of each sequence's tokens: logarithms of importance weights."""
    tokens = np.concatenate(differences)
    sums_R = np.array([d_N.sum() for d_N in differences])
    mean_R = np.array([np.abs(d_N).mean() if len(d_N) else 0.0 for d_N in differences])
    length_R = np.array([float(len(d_N)) for d_N in differences])
    return Effect(
        token_samples=effective(tokens),
        sequence_samples=effective(sums_R),
        spread=float(np.exp(np.minimum(tokens, 20.0)).std()),
        clipped=float((np.abs(tokens) > math.log(UPPER)).mean()),
        length=correlation(mean_R, length_R),
        advantage=None if advantages_R is None else correlation(mean_R, advantages_R),
    )
