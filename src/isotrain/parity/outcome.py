"""P5: is the validation score the same, slice by slice and over all of them?

K: seeds, L: slices.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from isotrain.parity.equivalence import FEWEST_SEEDS, MARGIN
from isotrain.parity.levels import Check, Level, State, not_run
from isotrain.parity.run import Run

_SCORE = re.compile(r"^val(-core)?/")
RESAMPLES = 2000


def outcome_level(pairs: Sequence[tuple[Run, Run]], seed: int = 0) -> Level:
    """`pairs` are reference and candidate of one seed each, with validation at their end."""
    if len(pairs) < FEWEST_SEEDS:
        return not_run("P5", f"scores need {FEWEST_SEEDS} seeds or more, {len(pairs)} are there")
    runs = [run for pair in pairs for run in pair]
    slices = [m for m in pairs[0][0].metrics if _SCORE.match(m) and all(m in run.metrics for run in runs)]
    if not slices:
        return not_run("P5", "the runs have no validation in common")
    a_KL, b_KL = (np.array([[_last(pair[side], m) for m in slices] for pair in pairs]) for side in (0, 1))
    spread_L = a_KL.std(axis=0, ddof=1)
    checks, rows = [], []
    difference_KL = (b_KL - a_KL) / np.where(spread_L > 0, spread_L, 1.0)
    low, high = _interval(difference_KL, seed)
    for number, name in enumerate(slices):
        mean = float(difference_KL[:, number].mean())
        rows.append([name, *(f"{x[:, number].mean():.4g}" for x in (a_KL, b_KL)), f"{mean:+.2f}"])
    reach = max(abs(low), abs(high))
    state: State = "cannot tell"
    if reach <= MARGIN:
        state = "same"
    elif low > MARGIN or high < -MARGIN:
        state = "different"
    passed = {"same": True, "different": False}.get(state)
    note = f"in standard deviations of {len(pairs)} seeds, 90 % interval {low:+.2f} to {high:+.2f}"
    checks.append(Check("interquartile mean of the scores' differences", reach, MARGIN, passed, note))
    told = f"the validation scores of {len(slices)} slice(s) differ by {low:+.2f} to {high:+.2f} of a seed's"
    table = {"columns": ["slice", "reference", "candidate", "difference in seeds' sd"], "rows": rows}
    return Level("P5", state, told + " standard deviation", tuple(checks), (), {"table": table})


def interquartile_mean(values: npt.NDArray[np.float64]) -> float:
    """The mean of the middle half: one seed that failed does not decide."""
    ordered = np.sort(values, axis=None)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def _interval(difference_KL: npt.NDArray[np.float64], seed: int) -> tuple[float, float]:
    """90 %, seeds drawn again within each slice."""
    draw = np.random.default_rng(seed)
    seeds, slices = difference_KL.shape
    means = [
        interquartile_mean(difference_KL[draw.integers(0, seeds, (seeds, slices)), np.arange(slices)])
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(means, [0.05, 0.95])
    return float(low), float(high)


def _last(run: Run, metric: str) -> float:
    return float(run.metrics[metric].values_S[-1])
