"""P5: is the validation score the same, slice by slice and over all of them?

K: seeds, L: slices.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from isotrain.parity.equivalence import FEWEST_SEEDS, MARGIN, Tost, tost
from isotrain.parity.levels import Check, Level, State, not_run
from isotrain.parity.run import Run

# Scores alone: other figures of a validation are no measure of quality.
_SCORE = re.compile(r"^val-core/.+@\d+$|^val/(loss|accuracy|f1)$")
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
    if not np.isfinite(a_KL).all():
        return not_run("P5", "a score of the reference is not a number")
    if not np.isfinite(b_KL).all():
        return Level("P5", "different", "a validation score of the candidate is not a number")
    spread_L = a_KL.std(axis=0, ddof=1)
    each = [tost(b_K - a_K, s) for a_K, b_K, s in zip(a_KL.T, b_KL.T, spread_L, strict=True)]
    checks = [
        _check(f"{name}: largest plausible difference", one, len(pairs))
        for name, one in zip(slices, each, strict=True)
    ]
    # In units of a seed's spread, so that slices can be taken together; one without a spread has no unit.
    varied = spread_L > 0
    decide = [one.state for one, has_unit in zip(each, varied, strict=True) if not has_unit]
    if varied.any():
        overall = _interval((b_KL - a_KL)[:, varied] / spread_L[varied], seed)
        decide.append(overall.state)
        name = "interquartile mean over all slices, in seeds' standard deviations"
        checks.append(_check(name, overall, len(pairs)))
    state: State = "same" if all(one == "same" for one in decide) else "cannot tell"
    if "different" in [*decide, *(one.state for one in each)]:
        state = "different"
    rows = [
        [name, f"{a_K.mean():.4g}", f"{b_K.mean():.4g}", one.state]
        for name, a_K, b_K, one in zip(slices, a_KL.T, b_KL.T, each, strict=True)
    ]
    table = {"columns": ["slice", "reference", "candidate", "state"], "rows": rows}
    return Level("P5", state, _words(state, slices, each), tuple(checks), (), {"table": table})


def _words(state: State, slices: Sequence[str], each: Sequence[Tost]) -> str:
    what = f"the validation scores of {len(slices)} slice(s)"
    if state == "different":
        named = next((name for name, one in zip(slices, each, strict=True) if one.state == "different"), what)
        return f"{named} differs by more than {MARGIN:g} of what another seed changes"
    if state == "same":
        return f"{what} differ by less than {MARGIN:g} of what another seed changes"
    return f"seeds are too few to tell whether {what} are the same"


def _check(name: str, found: Tost, seeds: int) -> Check:
    passed = {"same": True, "different": False}.get(found.state)
    return Check(name, abs(found.mean) + found.half, found.margin, passed, f"{seeds} seeds")


def interquartile_mean(values: npt.NDArray[np.float64]) -> float:
    """The mean of the middle half: one seed that failed does not decide."""
    ordered = np.sort(values, axis=None)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def _interval(difference_KL: npt.NDArray[np.float64], seed: int) -> Tost:
    """90 % of the interquartile mean, seeds drawn again within each slice."""
    draw = np.random.default_rng(seed)
    seeds, slices = difference_KL.shape
    means = [
        interquartile_mean(difference_KL[draw.integers(0, seeds, (seeds, slices)), np.arange(slices)])
        for _ in range(RESAMPLES)
    ]
    low, high = (float(bound) for bound in np.quantile(means, [0.05, 0.95]))
    return Tost((low + high) / 2, (high - low) / 2, MARGIN)


def _last(run: Run, metric: str) -> float:
    return float(run.metrics[metric].values_S[-1])
