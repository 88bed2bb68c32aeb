"""Has the mismatch of training and inference left the range that its first steps explain?

The logarithm of the mean difference of log-probs varies from step to step around a level that model, types
and engine give it. The first steps tell level and spread. The limit is several spreads above it, and at
least `LEAST_FACTOR` times the level; a few steps in a row above it are no chance. It leaves slow drifts.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

METRIC = "training/rollout_logp_diff_mean"
FIRST_STEPS, IN_A_ROW = 10, 3
# Of the spread, by the median of deviations times 1.4826, which normal noise has as its standard deviation.
SPREADS, NORMAL, LEAST_FACTOR = 6.0, 1.4826, 3.0
# Nats per token: less is rounding of float32, whatever it is compared with.
LEAST = 1e-5
# At the start, with fresh weights on both sides: more has never been rounding.
LARGEST_START = 0.2


@dataclass
class MismatchWatch:
    """Is given every step's value, and has a problem while the last ones are out of range."""

    run: str = "RUN"
    """Its directory, for the command to run."""
    first: list[float] = field(default_factory=list)
    above: int = 0
    """Steps in a row above the limit."""
    problem: str = ""

    @property
    def limit(self) -> float:
        """The largest value that the first steps explain; before these are there, that of any start."""
        if len(self.first) < FIRST_STEPS:
            return LARGEST_START
        logs = [math.log(max(value, LEAST / 10)) for value in self.first]
        level = statistics.median(logs)
        spread = NORMAL * statistics.median(abs(value - level) for value in logs)
        return max(LEAST, math.exp(level + max(SPREADS * spread, math.log(LEAST_FACTOR))))

    def observe(self, step: int, value: float) -> str:
        """Returns a warning when the range is left, once until it is back."""
        limit = self.limit
        # A value that is no number is nothing measured, such as in a step without tokens.
        if not math.isnan(value):
            self.above = self.above + 1 if value > limit else 0
        if len(self.first) < FIRST_STEPS and math.isfinite(value):
            self.first.append(value)
        if self.above == 0:
            self.problem = ""
        elif self.above >= IN_A_ROW and not self.problem:
            self.problem = (
                f"step {step}: training and inference differ by {value:.2g} nats per token, the first steps "
                f"explain {limit:.2g}; for the cause: isotrain mismatch {self.run} (docs/reward-collapse.md)"
            )
            return self.problem
        return ""
