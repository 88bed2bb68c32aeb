"""How far the mean of a difference of two curves may be from zero by noise alone, where steps are correlated.

The noise is taken as a slow part (each step remembers the one before) with a white part on top, in unknown
shares. Both are weighed by how well they fit the cosine transform of the difference; the answer is averaged
over what fits. The lowest cosines are left out of the fit that shows a difference, because a real one lives
there. That a difference is small they may confirm: slow noise would show there too.

S: steps, M: noise models that are weighed, J: cosines, W: windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from isotrain.language import tr
from isotrain.tools.parity import thresholds
from isotrain.tools.parity.compare.statistics import Interval
from isotrain.tools.parity.run import Numbers

_MEMORIES = 24
_WHITE = (0.0, 0.2, 0.4, 0.6, 0.8)
# Logs have some seven digits: a smaller noise than that cannot be seen in them.
_SMALLEST = 1e-9
_BISECTIONS = 40
# Models that fit so much worse than the best change no chance that anybody looks at.
_NEGLIGIBLE = 1e-8


@dataclass(frozen=True)
class Mean:
    """The mean of a difference over a window of steps."""

    value: float
    interval: Interval | None
    """Interval of confidence `thresholds.CONFIDENCE`; None where there are too few steps for one."""
    chance: float
    """How often noise alone would make a mean at least as large."""


@dataclass(frozen=True)
class Windows:
    """Weights over the steps, each adding up to 1."""

    names: tuple[str, ...]
    weights_WS: Numbers


WINDOWS = (
    tr("whole run"),
    tr("first quarter"),
    tr("second quarter"),
    tr("third quarter"),
    tr("last quarter"),
)


@lru_cache(maxsize=8)
def windows_of(steps: int) -> Windows:
    """The whole run, and its quarters: a late difference is small in the whole."""
    bounds = np.linspace(0, steps, 5).round().astype(int)
    at_S = np.arange(steps)
    rows = [np.full(steps, 1.0 / steps)]
    for begin, end in pairwise(bounds.tolist()):
        first = min(begin, steps - 1)  # of fewer than four steps, each quarter has one
        last = max(end, first + 1)
        rows.append(((at_S >= first) & (at_S < last)) / (last - first))
    return Windows(WINDOWS, np.stack(rows))


def alarm_shares(windows: int) -> list[float]:
    """The part of the designed false alarms that each window may cause."""
    if windows == len(WINDOWS):
        return [thresholds.WHOLE_SHARE, *[thresholds.QUARTERS_SHARE / (windows - 1)] * (windows - 1)]
    return [1 / windows] * windows


def window_means(difference_S: Numbers, margin: float = 0.0, alarms: Sequence[float] = ()) -> list[Mean]:
    """The mean of a difference in each of `WINDOWS`.

    With `alarms`, an interval lies beyond the margin in no more than this share of pairs without a difference
    (see `wide_enough`), and within it if the lowest cosines agree that the noise is small: a difference in
    the course makes that interval wider, so that it cannot pass for small noise.
    """
    steps = len(difference_S)
    values_W = windows_of(steps).weights_WS @ difference_S if steps else np.zeros(len(WINDOWS))
    if steps and not np.any(difference_S):
        return [Mean(value, Interval(0.0, 0.0), 1.0) for value in values_W.tolist()]
    if steps < thresholds.FEWEST_STEPS:
        return [_of_few(difference_S, float(value)) for value in values_W]
    thinned_S, smallest = _thinned(difference_S), _SMALLEST * float(np.abs(difference_S).max(initial=0.0))
    fit = _fit(thinned_S, smallest)
    level_fit = _fit(thinned_S, smallest, of_level=True) if alarms and margin else None
    means = []
    for window, value in enumerate(values_W.tolist()):
        half = fit.half(1 - thresholds.CONFIDENCE, window)
        if alarms and abs(value) - half > margin:
            half = wide_enough(value, partial(fit.half, window=window), alarms[window], margin)
        elif level_fit is not None:
            level_half = level_fit.half(1 - thresholds.CONFIDENCE, window)
            half = level_half if abs(value) + level_half <= margin else max(half, level_half)
        means.append(Mean(value, Interval(value - half, value + half), fit.chance(value, window)))
    return means


def wide_enough(value: float, half_at: Callable[[float], float], alarm: float, margin: float) -> float:
    """Half of an interval of at least `thresholds.CONFIDENCE`; `half_at` gives it for an error rate.

    An interval beyond the margin calls a pair different. Where the noise is much larger than the margin, one
    of that confidence would do so too often without any difference: the rate of false alarms widens it.
    """
    half = half_at(1 - thresholds.CONFIDENCE)
    return max(half, half_at(alarm) - margin) if abs(value) - half > margin else half


def _of_few(difference_S: Numbers, value: float) -> Mean:
    """Too few to know their noise: they can be shown to be alike, by Student's t, and never to differ."""
    from scipy.special import stdtrit

    if len(difference_S) < 2:
        return Mean(value, None, float("nan"))
    quantile = float(stdtrit(len(difference_S) - 1, (1 + thresholds.CONFIDENCE) / 2))
    half = quantile * float(difference_S.std(ddof=1))  # of one step: a quarter may be a single one
    return Mean(value, Interval(value - half, value + half), float("nan"))


@dataclass(frozen=True)
class _Fit:
    """Noise of each window's mean: a mixture of Student's distributions."""

    share_M: Numbers
    spread_MW: Numbers
    degrees: int

    def chance(self, value: float, window: int) -> float:
        from scipy.special import stdtr  # half a second faster than scipy.stats

        if not value:
            return 1.0
        tails_M = 2 * stdtr(self.degrees, -abs(value) / self.spread_MW[:, window])
        return float(np.clip(self.share_M @ tails_M, 0.0, 1.0))

    def half(self, error: float, window: int) -> float:
        """Half of the interval that leaves out the true mean at this rate."""
        low, high = 0.0, 100.0 * float(self.spread_MW[:, window].max())
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if self.chance(middle, window) > error:
                low = middle
            else:
                high = middle
        return high


def _fit(difference_S: Numbers, smallest: float, *, of_level: bool = False) -> _Fit:
    """`of_level`: the lowest cosines say something about the noise too, and half of the prior is white."""
    left_out = thresholds.LEVEL if of_level else thresholds.COURSE
    from scipy.fft import dct

    spectra = _spectra(len(difference_S))
    shape_MJ = spectra.shape_MJ[:, left_out:]
    squares_J = dct(difference_S, norm="ortho")[left_out:] ** 2
    energy_M, log_M, count = (1 / shape_MJ) @ squares_J, np.log(shape_MJ).sum(axis=1), len(squares_J)
    variance_M = np.maximum(energy_M / count, max(smallest, np.finfo(np.float64).tiny ** 0.5) ** 2)
    log_prior_M = spectra.log_half_white_M if of_level else spectra.log_prior_M
    likelihood_M = log_prior_M - 0.5 * (log_M + count * np.log(variance_M))
    share_M = np.exp(likelihood_M - likelihood_M.max())
    fits_M = share_M > _NEGLIGIBLE
    spread_MW = np.sqrt(variance_M[:, None] * spectra.variance_MW)
    return _Fit(share_M[fits_M] / share_M[fits_M].sum(), spread_MW[fits_M], count)


@dataclass(frozen=True)
class _Spectra:
    """The noise models for one number of steps, each with variance 1."""

    shape_MJ: Numbers
    log_prior_M: Numbers
    log_half_white_M: Numbers
    """With as much weight on white noise, the first model, as on all others."""
    variance_MW: Numbers
    """Spectra of each window's mean."""


@lru_cache(maxsize=4)
def _spectra(steps: int) -> _Spectra:
    from scipy.fft import dct

    slowest = max(thresholds.SLOWEST, 1 - thresholds.SLOWEST_STEPS / steps)
    memory_M = 1 - np.geomspace(1.0, 1 - slowest, _MEMORIES)
    cosine_J = np.cos(np.pi * np.arange(steps) / steps)
    slow_MJ = (1 - memory_M[:, None] ** 2) / (1 - 2 * memory_M[:, None] * cosine_J + memory_M[:, None] ** 2)
    shapes, priors = [slow_MJ[:1]], [float(len(_WHITE))]  # without memory, there is no second part
    for white in _WHITE:
        shapes.append((1 - white) * slow_MJ[1:] + white)
        priors += [1.0] * (_MEMORIES - 1)
    shape_MJ = np.concatenate(shapes)
    weights_WJ = dct(windows_of(steps).weights_WS, norm="ortho", axis=1)
    half_white = [sum(priors[1:]), *priors[1:]]
    return _Spectra(
        shape_MJ, np.log(np.array(priors)), np.log(np.array(half_white)), shape_MJ @ (weights_WJ**2).T
    )


def _thinned(values_S: Numbers) -> npt.NDArray[np.float64]:
    """Means of blocks of steps; an incomplete last block is left to the one before."""
    block = -(-len(values_S) // thresholds.MOST_POINTS)
    if block == 1:
        return values_S
    starts = np.arange(0, len(values_S) - block + 1, block)
    sizes = np.diff(np.append(starts, len(values_S)))
    return np.add.reduceat(values_S, starts) / sizes
