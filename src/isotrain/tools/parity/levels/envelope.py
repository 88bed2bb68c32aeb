"""P3: is a candidate further from the reference than runs that only round otherwise are from each other?

Each of those runs is held against all others, as the candidate is: what they reach decides what is far. So
the rate of false alarms does not depend on the length of a run, the number of metrics or their tails.

S: steps that all runs have, N: the reference with its members, T: statistics, of all metrics and windows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from isotrain.errors import DataError
from isotrain.language import tr
from isotrain.tools.parity import thresholds
from isotrain.tools.parity.compare.noise import windows_of
from isotrain.tools.parity.compare.published import kind_of
from isotrain.tools.parity.levels.level import Check, Level, State, not_run
from isotrain.tools.parity.run import Numbers, RunLog, common

# What a run's numerics show in, by their names in isotrain, verl and OpenRLHF.
FOLLOWED = re.compile(
    r"(^|/)(\w*loss|\w*loss_mean|grad_norm|entropy|ppo_kl|kl|rewards?/mean|rollout_logp_diff_mean)$"
)
# A width from few members is itself uncertain: neighbouring steps share theirs.
WINDOW = 5
# Another device rounds otherwise from the first step on. In narrow types a changed last digit takes some
# steps until it makes as much noise: what the members have by then counts from the start.
EARLY = 10
# Points of an envelope that are kept for pictures, of a run of any length; how many widths they show.
_SHOWN, _DRAWN = 2000, 3.0
# Values come as float32 from the device: closer than some units of its last place is the same.
_FLOOR = 8 * float(np.finfo(np.float32).eps)
# In units of that: what a mean of equal numbers is off by.
_NOTHING = 1e-3


@dataclass(frozen=True)
class Distances:
    """How far one run is from others in one metric: signed means and sizes, over the run and its quarters."""

    statistics_T: Numbers
    width_S: Numbers
    """One width at each step, in the metric's unit."""


def followed(runs: Sequence[RunLog]) -> list[str]:
    """The metrics that show numerics and that all runs have."""
    return [m for m in runs[0].metrics if FOLLOWED.search(m) and all(m in run.metrics for run in runs)]


def distances(values_S: Numbers, others_NS: npt.NDArray[np.float64]) -> Distances:
    """Distances of a run from others, in units of how far these lie around their mean at each step."""
    centre_S = others_NS.mean(axis=0)
    around_S = others_NS.std(axis=0, ddof=1)
    early = float(np.sqrt(np.mean(around_S[:EARLY] ** 2)))
    # A policy loss is a sum around 0 of larger numbers: where it is small, it is not more exact.
    floor = _FLOOR * max(float(np.abs(centre_S).max(initial=0.0)), 1e-3)
    width_S = np.maximum(rolling(around_S), max(early, floor))
    scaled_S = (values_S - centre_S) / width_S
    weights_WS = windows_of(len(values_S)).weights_WS
    signed_W = np.abs(weights_WS @ scaled_S)
    size_W = np.sqrt(weights_WS @ scaled_S**2)
    return Distances(np.concatenate([signed_W, size_W]), width_S)


def rolling(values_S: Numbers) -> Numbers:
    """Root mean square over the steps up to each one: an error must not be spread to steps before it."""
    squares = np.concatenate([[0.0], np.cumsum(values_S**2)])
    ends = np.arange(1, len(values_S) + 1)
    starts = np.maximum(0, ends - WINDOW)
    rolled: Numbers = np.sqrt((squares[ends] - squares[starts]).clip(min=0) / (ends - starts))
    return rolled


@dataclass(frozen=True)
class Calibrated:
    """The candidate's statistics in units of the members', and how large the largest of them may be."""

    ratio_T: Numbers
    limit: float


def calibrated(candidate_T: Numbers, members_NT: npt.NDArray[np.float64]) -> Calibrated:
    """The largest statistic of each member is one draw of what the candidate's may be; in logarithms."""
    from scipy.special import stdtrit

    count = len(members_NT)
    squares_NT = members_NT**2
    tiny = np.finfo(np.float64).tiny
    typical_NT = np.sqrt((squares_NT.sum(axis=0) - squares_NT).clip(min=0) / (count - 1))
    # A member that happens to lie in the middle of the others says nothing about how far out one may be.
    largest_N = np.log((members_NT / np.maximum(typical_NT, tiny)).max(axis=1).clip(min=1.0))
    reach = float(stdtrit(count - 1, 1 - thresholds.FALSE_ALARMS)) * math.sqrt(1 + 1 / count)
    spread = max(float(largest_N.std(ddof=1)), thresholds.SPREAD_FLOOR)
    limit = math.exp(float(largest_N.mean()) + reach * spread)
    return Calibrated(candidate_T / np.maximum(np.sqrt(squares_NT.mean(axis=0)), tiny), limit)


def envelope_level(
    reference: RunLog,
    candidate: RunLog,
    members: Sequence[RunLog],
    margins: Mapping[str, float] | None = None,
) -> Level:
    """The candidate among the reference and its members, in every metric that is followed."""
    if len(members) < thresholds.FEWEST_MEMBERS:
        few = tr(
            "an envelope needs {fewest} members or more, {count} are there",
            fewest=thresholds.FEWEST_MEMBERS,
            count=len(members),
        )
        return not_run("P3", few)
    by_metric = _all_distances(reference, candidate, members)
    if not by_metric:
        return not_run("P3", tr("the runs have no loss or gradient norm in common"))
    if all((own_NT == 1).all() for _, _, own_NT in by_metric.values()):
        words = tr(
            "the members are equal to the reference in every digit: vary the kernel, micro-batch or ranks"
        )
        return not_run("P3", words)
    names = list(by_metric)
    rated = calibrated(
        np.concatenate([by_metric[name][1].statistics_T for name in names]),
        np.concatenate([by_metric[name][2] for name in names], axis=1),
    )
    checks, evidence = list[Check](), dict[str, Any]()
    per_metric = np.split(rated.ratio_T, len(names))
    ratios = {name: _largest(ratio_T) for name, ratio_T in zip(names, per_metric, strict=True)}
    for name in names:
        steps_S, distances, _ = by_metric[name]
        inside = ratios[name] <= rated.limit
        what = tr("{metric}: distance / members'", metric=name)
        checks.append(Check(what, ratios[name], rated.limit, inside, tr("at most")))
        evidence[name] = _drawn(steps_S, distances, len(members))
    worst = max(names, key=lambda name: ratios[name])
    if ratios[worst] > rated.limit:
        state: State = "different"
        words = tr(
            "{metric} is {ratio:.3g} times as far from the reference as runs that only round otherwise are "
            "(at most {limit:.2g})",
            metric=worst,
            ratio=ratios[worst],
            limit=rated.limit,
        )
    else:
        seen = {name: rated.limit * _unit(by_metric[name]) for name in names}
        wide = [n for n in names if seen[n] > thresholds.INFORMATIVE * _margin(n, margins or {})]
        state = "cannot tell" if wide else "same"
        if wide:
            words = tr(
                "{metric} of runs that only round otherwise differs so much that a difference of "
                "{difference:.2g} would not be seen",
                metric=wide[0],
                difference=seen[wide[0]],
            )
        else:
            words = tr(
                "they stay within what harmless rounding does to the reference ({count} runs; {metric} at "
                "{ratio:.2g} of {limit:.2g})",
                count=len(members),
                metric=worst,
                ratio=ratios[worst],
                limit=rated.limit,
            )
    return Level("P3", state, words, tuple(checks), (), {"envelope": evidence})


Found = tuple[npt.NDArray[np.int64], Distances, npt.NDArray[np.float64]]


def _all_distances(reference: RunLog, candidate: RunLog, members: Sequence[RunLog]) -> dict[str, Found]:
    runs = (reference, candidate, *members)
    by_metric: dict[str, Found] = {}
    for metric in followed(runs):
        steps_S, (reference_S, values_S, *members_S) = common([run.metrics[metric] for run in runs])
        if not len(steps_S):
            continue
        own_NS = np.stack([reference_S, *members_S])
        if not np.isfinite(own_NS).all():
            raise DataError(
                f"'{metric}' of the reference or of a member of its envelope is not a number somewhere"
            )
        own_NT = np.stack(
            [distances(own_NS[n], np.delete(own_NS, n, axis=0)).statistics_T for n in range(len(own_NS))]
        )
        if (own_NT < _NOTHING).all():
            # They do not vary at all, so what is less than the last digits is no distance either.
            own_NT = np.ones_like(own_NT)
        by_metric[metric] = (steps_S, distances(values_S, own_NS), own_NT)
    return by_metric


def _largest(ratio_T: Numbers) -> float:
    return float(np.where(np.isfinite(ratio_T), ratio_T, np.inf).max())


def _unit(entry: Found) -> float:
    """A ratio of 1 in the metric's unit, for the mean over the whole run."""
    _, distances, own_NT = entry
    return float(np.sqrt(np.mean(own_NT[:, 0] ** 2))) * float(np.sqrt(np.mean(distances.width_S**2)))


def _margin(metric: str, margins: Mapping[str, float]) -> float:
    """Infinite for what nobody has stated a margin of."""
    kind = kind_of(metric)
    return margins.get(metric, thresholds.MARGINS[kind] if kind else math.inf)


def _drawn(steps_S: npt.NDArray[np.int64], distances: Distances, members: int) -> dict[str, Any]:
    """As differences from the reference, which is how they are drawn."""
    thin = slice(None, None, -(-len(steps_S) // _SHOWN))
    half_S = _DRAWN * distances.width_S[thin]
    return {
        "steps": steps_S[thin].tolist(),
        "low": (-half_S).tolist(),
        "high": half_S.tolist(),
        "members": members,
    }
