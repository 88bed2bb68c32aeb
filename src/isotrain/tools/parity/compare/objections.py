"""What keeps a pair from being called equivalent although its losses and rewards are within the margin.

None of it makes the pair different by itself: somebody has to look at it.

S: steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from isotrain.language import tr
from isotrain.tools.parity import thresholds
from isotrain.tools.parity.compare.noise import WINDOWS, window_means
from isotrain.tools.parity.run import ROLES, Numbers, RunLog, Series, common

SPEED = ("perf/throughput", "throughput", "tokens_per_second")

# A hostile log may have any number of metrics.
_MOST_WATCHED = 24


@dataclass(frozen=True)
class Watched:
    """Metrics without a margin whose levels two runs of one recipe share, by their names in several logs."""

    name: re.Pattern[str]
    floor: float
    """What is so small does not matter, and is mostly noise: it is added before a ratio is taken."""
    only_lower: bool = False


WATCHED = {
    "length": Watched(
        re.compile(r"(^|/)(response_length(/mean|_mean)?|completions?/mean_length|completion_length)$"), 1.0
    ),
    # That between engine and trained model is rounding.
    "kl": Watched(
        re.compile(r"^(?!rollout_corr/)(.*/)?(ppo_kl|approx_kl|kl_loss|kl|reward_kl_penalty)(_mean|/mean)?$"),
        1e-3,
    ),
    "entropy": Watched(re.compile(r"(^|/)(policy_)?entropy(_loss)?(_mean|/mean)?$"), 1e-2),
    "grad_norm": Watched(re.compile(r"(^|[/_])grad_norm(/mean)?$"), 0.0),
    "clip": Watched(
        re.compile(r"(^|/)((pg_)?clip_?frac(_lower)?|(response_length/)?clip_ratio)(/mean)?$"), 1e-2
    ),
    "throughput": Watched(re.compile("|".join(f"^{name}$" for name in SPEED)), 0.0, only_lower=True),
}
# The same for each metric, so that a single step without a gradient is no level of its own.
_RELATIVE_FLOOR = 0.02


def watched_kind(metric: str) -> str | None:
    """The name in `WATCHED` that a metric has there, if any."""
    return next((name for name, kind in WATCHED.items() if kind.name.search(metric)), None)


OBJECTIONS = ("steps", "validation", "metrics", *WATCHED)


@dataclass(frozen=True)
class Objection:
    name: str
    """What `--allow` calls it: one of `OBJECTIONS`, `recipe` or `data`."""
    words: str


def ended_early(reference: RunLog, candidate: RunLog, metrics: Sequence[str]) -> Iterator[Objection]:
    """A run whose compared metrics end before its plan or before the other run's, by more than one record."""
    runs = {"reference": reference, "candidate": candidate}
    for role, run in runs.items():
        other = runs["candidate" if role == "reference" else "reference"]
        planned = run.planned_steps or 0
        endings = []
        for metric in metrics:
            series, other_series = run.metrics[metric], other.metrics[metric]
            expected = max(int(other_series.steps_S[-1]), planned)
            last = int(series.steps_S[-1])
            if expected - last > max(_recording_interval(series), _recording_interval(other_series)):
                endings.append((last, expected))
        if endings:
            last, expected = min(endings)
            words = tr(
                "the {role} ended at step {last:,} of {expected:,}",
                role=ROLES[role],
                last=last,
                expected=expected,
            )
            yield Objection("steps", words)


def _recording_interval(series: Series) -> float:
    """Steps from one record to the next; a log may lack what came after its last record."""
    return float(np.median(np.diff(series.steps_S))) if len(series) > 1 else 1.0


def looks_wrong(reference: RunLog, candidate: RunLog) -> Iterator[Objection]:
    """Lengths, KL, entropy, gradient norm, clip ratios and throughput at levels that no honest pair has."""
    watched = 0
    for metric, series in reference.metrics.items():
        name = watched_kind(metric)
        if name is None or metric not in candidate.metrics or watched == _MOST_WATCHED:
            continue
        # Known devices may differ in speed: that is no surprise.
        if name == "throughput" and (reference.environment or candidate.environment):
            continue
        watched += 1
        steps_S, (a_S, b_S) = common([series, candidate.metrics[metric]])
        broken_S = np.isfinite(a_S) & ~np.isfinite(b_S)
        if broken_S.any():
            step = int(steps_S[np.argmax(broken_S)])
            words = tr("{metric} of the candidate is not a number at step {step}", metric=metric, step=step)
            yield Objection(name, words)
            continue
        finite_S = np.isfinite(a_S) & np.isfinite(b_S)
        if finite_S.sum() >= thresholds.FEWEST_STEPS:
            words = _other_level(metric, WATCHED[name], a_S[finite_S], b_S[finite_S])
            if words:
                yield Objection(name, words)


def _other_level(metric: str, watched: Watched, reference_S: Numbers, candidate_S: Numbers) -> str:
    """A ratio of levels or of growths beyond `thresholds.OTHER_LEVEL`, in words; empty if there is none.

    In logarithms, so that single spikes weigh little and both directions weigh alike.
    """
    sizes = np.abs(reference_S), np.abs(candidate_S)
    floor = max(watched.floor, _RELATIVE_FLOOR * float(np.median(np.concatenate(sizes))))
    if not floor:
        return ""
    means = window_means(np.log(sizes[1] + floor) - np.log(sizes[0] + floor))
    halves = [0.0 if mean.interval is None else mean.interval.high - mean.value for mean in means]
    first, last = 1, len(means) - 1
    growth = tr("growth from the first to the last quarter")
    ratios = [
        (means[0].value, halves[0], WINDOWS[0]),
        (means[last].value, halves[last], WINDOWS[last]),
        (means[last].value - means[first].value, math.hypot(halves[first], halves[last]), growth),
    ]
    clear = [
        (abs(log), log, window)
        for log, half, window in ratios
        if abs(log) > max(math.log(thresholds.OTHER_LEVEL), 2 * half) and not (watched.only_lower and log > 0)
    ]
    if not clear:
        return ""
    _, log, window = max(clear)
    return tr(
        "{metric} is {ratio:.2g} times the reference's ({window})",
        metric=metric,
        ratio=math.exp(min(log, 700.0)),
        window=window,
    )
