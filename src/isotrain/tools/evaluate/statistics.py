"""pass@k, intervals of means over items, and the paired test of two models.

I: items (rows of the data), each with the same number of responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

Numbers = npt.NDArray[np.float64]

LEVEL = 0.95
FLIPS = 20_000
_FLIP_SEED = 0
_FLIPS_AT_ONCE = 256


def pass_at_k(responses: int, correct: int, k: int) -> float:
    """The unbiased estimate of how likely one of `k` responses is correct, from more responses.

    As 1 - C(n - c, k) / C(n, k), in factors that do not overflow.
    """
    assert 0 <= correct <= responses and 1 <= k <= responses
    if responses - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(responses - correct + 1, responses + 1))


@dataclass(frozen=True)
class Estimate:
    """A mean over items, with the interval that holds the mean over many more items of this kind."""

    mean: float
    low: float
    high: float
    items: int

    def as_json(self) -> dict[str, float | int]:
        return {"mean": self.mean, "low": self.low, "high": self.high, "items": self.items}


def estimate(values_I: Sequence[float] | Numbers, lowest: float = 0.0, highest: float = 1.0) -> Estimate:
    """Mean and 95 % interval of items whose values are between two bounds, or of any values beyond them.

    Responses to one item are alike, so items are what is counted. The interval is the exact one of a binomial
    (Clopper-Pearson) for the number of yes-or-no items that would vary as these do. That number is counted
    with one item at each bound added: a few items that happen to be equal say little about the next. Values
    beyond the bounds have the interval of Student's t.
    """
    values_I = np.asarray(values_I, np.float64)
    items, mean = len(values_I), float(values_I.mean())
    if values_I.min() < lowest or values_I.max() > highest:
        return Estimate(mean, *_student(values_I), items)
    width = highest - lowest
    share_I = (values_I - lowest) / width
    padded = np.concatenate([share_I, [0.0, 1.0]])
    centre, variance = padded.mean(), padded.var(ddof=1)
    effective = max(1.0, items * centre * (1.0 - centre) / variance)
    tail, hits = (1.0 - LEVEL) / 2, float(share_I.mean()) * effective
    low = stats.beta.ppf(tail, hits, effective - hits + 1) if share_I.any() else 0.0
    high = stats.beta.isf(tail, hits + 1, effective - hits) if (share_I < 1).any() else 1.0
    return Estimate(mean, lowest + width * float(low), lowest + width * float(high), items)


def _student(values_I: Numbers) -> tuple[float, float]:
    items, mean = len(values_I), float(values_I.mean())
    if items < 2:  # nothing is known of the spread
        return -math.inf, math.inf
    half = stats.t.ppf((1 + LEVEL) / 2, items - 1) * values_I.std(ddof=1) / math.sqrt(items)
    return mean - float(half), mean + float(half)


@dataclass(frozen=True)
class Comparison:
    """Second minus first model over the same items."""

    difference: Estimate
    p_value: float
    better: int
    """Items on which the second model is better."""
    worse: int

    @property
    def differs(self) -> bool:
        return self.p_value < 1.0 - LEVEL

    def as_json(self) -> dict[str, float | int | bool]:
        facts = {"p_value": self.p_value, "better": self.better, "worse": self.worse}
        return {**self.difference.as_json(), **facts, "differs": self.differs}


def compare(first_I: Sequence[float] | Numbers, second_I: Sequence[float] | Numbers) -> Comparison:
    """The paired test of two models: items on which both are equal say nothing.

    If the models were alike, each item's difference could as well have the other sign. The p-value is the
    share of random signs with which the sum is at least as large.
    """
    difference_I = np.asarray(second_I, np.float64) - np.asarray(first_I, np.float64)
    changed = difference_I[difference_I != 0]
    draw, total = np.random.default_rng(_FLIP_SEED), abs(changed.sum()) - 1e-9
    as_large = 0
    for start in range(0, FLIPS, _FLIPS_AT_ONCE):
        signs = draw.choice([-1.0, 1.0], size=(min(_FLIPS_AT_ONCE, FLIPS - start), len(changed)))
        as_large += int((np.abs(signs @ changed) >= total).sum())
    return Comparison(
        difference=estimate(difference_I, -1.0, 1.0),
        p_value=(as_large + 1) / (FLIPS + 1),
        better=int((changed > 0).sum()),
        worse=int((changed < 0).sum()),
    )
