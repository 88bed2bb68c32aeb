"""P4: over several seeds, does the difference of two devices provably lie within a stated margin?

K: seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isotrain.parity.levels import Check, Level, State, not_run
from isotrain.parity.published import kind_of
from isotrain.parity.run import Numbers, Run, common

# Stated in advance: half of what another seed does to the outcome is nothing that a team would notice.
MARGIN = 0.5
FEWEST_SEEDS = 3
# The end of a run is what it was made for; its last quarter is less noisy than its last step.
_END = 0.25


@dataclass(frozen=True)
class Tost:
    """Two one-sided tests: the 90 % interval of the mean difference beside the margin."""

    mean: float
    half: float
    margin: float

    @property
    def state(self) -> State:
        if abs(self.mean) + self.half <= self.margin:
            return "same"
        return "different" if abs(self.mean) - self.half > self.margin else "cannot tell"


def quantile(seeds: int) -> float:
    """Of a mean over so many seeds, one-sided 95 %: Student's t."""
    from scipy.special import stdtrit  # half a second faster than scipy.stats, and only where seeds are

    return float(stdtrit(seeds - 1, 0.95))


def tost(difference_K: Numbers, spread: float) -> Tost:
    """`spread` is the standard deviation over seeds of the reference's outcome."""
    seeds = len(difference_K)
    half = quantile(seeds) * float(difference_K.std(ddof=1)) / math.sqrt(seeds)
    return Tost(float(difference_K.mean()), half, MARGIN * spread)


def equivalence_level(pairs: Sequence[tuple[Run, Run]]) -> Level:
    """`pairs` are reference and candidate of one seed each."""
    if len(pairs) < FEWEST_SEEDS:
        return not_run("P4", f"equivalence needs {FEWEST_SEEDS} seeds or more, {len(pairs)} are there")
    runs = [run for pair in pairs for run in pair]
    metrics = [m for m in pairs[0][0].metrics if kind_of(m) and all(m in run.metrics for run in runs)]
    if not metrics:
        return not_run("P4", "the runs have no loss or reward in common")
    checks, rows, states = [], [], list[State]()
    for metric in metrics:
        ends = [_ends(metric, *pair) for pair in pairs]
        if not np.isfinite(ends).all():
            return Level("P4", "different", f"'{metric}' is not a number at the end of a run")
        reference_K = np.array([end for end, _ in ends])
        difference_K = np.array([end for _, end in ends]) - reference_K
        found = tost(difference_K, float(reference_K.std(ddof=1)))
        states.append(found.state)
        reach = abs(found.mean) + found.half
        checks.append(
            Check(
                f"{metric}: largest plausible difference",
                reach,
                found.margin,
                {"same": True, "different": False}.get(found.state),
                f"{MARGIN:g} standard deviations of {len(pairs)} seeds",
            )
        )
        rows.append([metric, *(f"{x:.4g}" for x in (found.mean, found.half, found.margin)), found.state])
    state: State = "different" if "different" in states else "same"
    if state == "same" and "cannot tell" in states:
        state = "cannot tell"
    table = {"columns": ["metric", "mean difference", "+-", "margin", "state"], "rows": rows}
    return Level("P4", state, _words(state, len(pairs)), tuple(checks), (), {"table": table})


def _words(state: State, seeds: int) -> str:
    margin = f"{MARGIN:g} of what another seed changes"
    if state == "same":
        return f"over {seeds} seeds the end of the run differs provably by less than {margin}"
    if state == "different":
        return f"over {seeds} seeds the end of the run differs by more than {margin}"
    return f"{seeds} seeds are too few to show that the end of the run differs by less than {margin}"


def _ends(metric: str, reference: Run, candidate: Run) -> tuple[float, float]:
    _, (a_S, b_S) = common([reference.metrics[metric], candidate.metrics[metric]])
    last = max(1, round(_END * len(a_S)))
    return float(a_S[-last:].mean()), float(b_S[-last:].mean())
