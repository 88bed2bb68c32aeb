"""P3: is a candidate further from the reference than harmless changes of the last digit take it?

S: steps that all runs have, M: members of the ensemble.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from isotrain.errors import DataError
from isotrain.parity.levels import Check, Level, not_run
from isotrain.parity.run import Numbers, Run, common

# What a run's numerics show in, by their names in isotrain, verl and OpenRLHF.
FOLLOWED = re.compile(
    r"(^|/)(\w*loss|\w*loss_mean|grad_norm|entropy|ppo_kl|kl|rewards?/mean|rollout_logp_diff_mean)$"
)
FEWEST_MEMBERS = 3
# A width from few members is itself uncertain: neighbouring steps share theirs.
WINDOW = 5
# Another device rounds otherwise from the first step on. In narrow types a changed last digit takes some
# steps until it makes as much noise: what the members have by then counts from the start.
EARLY = 10
# Honest pairs reach 2.7, mutations in float32 begin at 12: benchmarks/parity_power.py.
LIMIT = 6.0
# Points of an envelope that are kept for pictures, of a run of any length.
_SHOWN = 2000
# Values come as float32 from the device: closer than some units of its last place is the same.
_FLOOR = 8 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Envelope:
    """One metric's reference and how far the members lie around it, step by step."""

    steps_S: npt.NDArray[np.int64]
    reference_S: Numbers
    width_S: Numbers
    """Root mean square of the members' distances, over a window of steps; at least that of the first ones."""
    members: int

    def ratio(self, values_S: Numbers) -> Numbers:
        """A run's distance in units of the width, over the same windows: about 1 for a further member."""
        return _rolling(values_S - self.reference_S) / self.width_S


def envelope(steps_S: npt.NDArray[np.int64], reference_S: Numbers, members_MS: Sequence[Numbers]) -> Envelope:
    apart_S = np.sqrt(np.mean([(v - reference_S) ** 2 for v in members_MS], axis=0))
    early = float(np.sqrt(np.mean(apart_S[:EARLY] ** 2)))
    # A policy loss is a sum around 0 of larger numbers: where it is small, it is not more exact.
    floor = _FLOOR * max(float(np.abs(reference_S).max(initial=0.0)), 1e-3)
    width_S = np.maximum(_rolling(apart_S), max(early, floor))
    return Envelope(steps_S, reference_S, width_S, len(members_MS))


def followed(runs: Sequence[Run]) -> list[str]:
    """The metrics that show numerics and that all runs have."""
    return [m for m in runs[0].metrics if FOLLOWED.search(m) and all(m in run.metrics for run in runs)]


def envelope_level(reference: Run, candidate: Run, members: Sequence[Run]) -> Level:
    """The candidate inside the envelope of its reference's ensemble, in every metric that is followed."""
    if len(members) < FEWEST_MEMBERS:
        return not_run("P3", f"an envelope needs {FEWEST_MEMBERS} members or more, {len(members)} are there")
    checks, evidence = [], dict[str, Any]()
    worst: tuple[float, str, int] = (0.0, "", 0)
    runs = (reference, candidate, *members)
    for metric in followed(runs):
        steps_S, (reference_S, values_S, *members_MS) = common([run.metrics[metric] for run in runs])
        if not len(steps_S):
            continue
        if not all(np.isfinite(own_S).all() for own_S in (reference_S, *members_MS)):
            raise DataError(
                f"'{metric}' of the reference or of a member of its envelope is not a number somewhere"
            )
        around = envelope(steps_S, reference_S, members_MS)
        ratio_S = around.ratio(values_S)
        ratio_S = np.where(np.isfinite(ratio_S), ratio_S, np.inf)
        top = int(np.argmax(ratio_S))
        largest, step = float(ratio_S[top]), int(steps_S[top])
        checks.append(
            Check(f"{metric}: distance / envelope", largest, LIMIT, largest <= LIMIT, f"step {step}")
        )
        beyond = np.flatnonzero(ratio_S > LIMIT)
        if largest > worst[0]:
            worst = (largest, metric, int(steps_S[beyond[0]]) if len(beyond) else step)
        thin = slice(None, None, -(-len(steps_S) // _SHOWN))
        evidence[metric] = {
            "steps": steps_S[thin].tolist(),
            # As differences from the reference, which is how they are drawn.
            "low": (-LIMIT * around.width_S[thin]).tolist(),
            "high": (LIMIT * around.width_S[thin]).tolist(),
            "members": around.members,
        }
    if not checks:
        return not_run("P3", "the runs have no loss or gradient norm in common")
    largest, metric, step = worst
    inside = all(check.passed for check in checks)
    words = (
        f"they stay within what changes of the last digit do to the reference ({len(members)} runs; at "
        f"most {largest:.1f} of {LIMIT:g} widths, {metric})"
        if inside
        else f"{metric} leaves the envelope of harmless rounding at step {step} and is then up to "
        f"{largest:.3g} widths away (at most {LIMIT:g})"
    )
    return Level("P3", "same" if inside else "different", words, tuple(checks), (), {"envelope": evidence})


def _rolling(values_S: Numbers) -> Numbers:
    """Root mean square over the steps up to each one: an error must not be spread to steps before it."""
    squares = np.concatenate([[0.0], np.cumsum(values_S**2)])
    ends = np.arange(1, len(values_S) + 1)
    starts = np.maximum(0, ends - WINDOW)
    rolled: Numbers = np.sqrt((squares[ends] - squares[starts]).clip(min=0) / (ends - starts))
    return rolled
