"""By how much a metric of two runs differs, beside the margin that matters.

S: steps, K: runs of a side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from isotrain.language import tr
from isotrain.tools.parity import thresholds
from isotrain.tools.parity.compare.noise import WINDOWS, wide_enough, window_means, windows_of
from isotrain.tools.parity.compare.statistics import Interval
from isotrain.tools.parity.run import ROLES, Numbers, RunLog, common
from isotrain.tools.parity.thresholds import Kind

Answer = Literal["equivalent", "different", "inconclusive"]
ANSWERS: dict[Answer, str] = {
    "equivalent": tr("equivalent"),
    "different": tr("different"),
    "inconclusive": tr("inconclusive"),
}

WHOLE, LAST = WINDOWS[0], WINDOWS[-1]
ALONE = tr("one run a side")
VALIDATION = tr("last validations")
# A run is equivalent by its level and by how it ends; the other quarters can only show a difference.
_DECIDE = (WHOLE, LAST)
_DECIDING = (*_DECIDE, VALIDATION)
_ALARMS = {
    **dict.fromkeys(WINDOWS, thresholds.QUARTER_ALARMS),
    WHOLE: thresholds.WHOLE_ALARMS,
    LAST: thresholds.LAST_ALARMS,
    VALIDATION: thresholds.WHOLE_ALARMS,
}
_MOST_RUNS = 1000
_NORMAL_HALF = 1.959963984540054
"""Half of a 95 % interval, in standard deviations."""


@dataclass(frozen=True)
class WindowEffect:
    """Candidate minus reference, over a window of the run."""

    window: str
    reference: float
    candidate: float
    difference: float
    interval: Interval | None
    """95 %; None where the evidence is too small for one."""
    chance: float
    """How often two runs without a difference would be at least as far apart."""


@dataclass(frozen=True)
class Effect:
    """One metric's answer."""

    metric: str
    kind: Kind
    margin: float
    verdict: Answer
    windows: tuple[WindowEffect, ...]
    evidence: str
    """The runs that it was estimated from, such as `one run a side`."""
    reason: str = ""
    """Why it is different, where that is not the size of a mean."""
    runs_to_decide: int | None = None
    """Runs of each side that would decide, where more of them would."""
    alone: Answer | None = None
    """What one run a side says, where more were given."""
    same_as: str | None = None
    """An earlier metric that is equal in every value of both runs: the two count once."""

    @property
    def unit(self) -> str:
        return f"the {self.kind}'s own unit"

    def of(self, window: str) -> WindowEffect:
        return next(effect for effect in self.windows if effect.window == window)

    @property
    def worst(self) -> WindowEffect:
        """The window that the verdict rests on: the first that is different, or else the whole run."""
        if self.verdict != "different" or self.reason:
            return self.windows[0]
        beyond = [
            one
            for one in self.windows
            if one.interval is not None and max(one.interval.low, -one.interval.high) > self.margin
        ]
        return beyond[0]

    def as_json(self) -> dict[str, Any]:
        whole = asdict(self.windows[0])
        return {
            "verdict": self.verdict,
            **{key: whole[key] for key in ("reference", "candidate", "difference", "interval", "chance")},
            "margin": self.margin,
            "unit": self.unit,
            "kind": self.kind,
            "evidence": self.evidence,
            "reason": self.reason,
            "runs_to_decide": self.runs_to_decide,
            "alone": self.alone,
            "same_as": self.same_as,
            "windows": [asdict(one) for one in self.windows],
        }


def effect_of_curves(
    metric: str,
    kind: Kind,
    margin: float,
    reference_S: Numbers,
    candidate_S: Numbers,
) -> Effect:
    """From one run a side."""
    means = window_means(candidate_S - reference_S, margin, [_ALARMS[window] for window in WINDOWS])
    weights_WS = windows_of(len(reference_S)).weights_WS
    windows = tuple(
        WindowEffect(
            name, float(w_S @ reference_S), float(w_S @ candidate_S), mean.value, mean.interval, mean.chance
        )
        for name, w_S, mean in zip(WINDOWS, weights_WS, means, strict=True)
    )
    reason = _flat(reference_S, candidate_S)
    verdict = "different" if reason else _answer(windows, margin)
    return Effect(metric, kind, margin, verdict, windows, ALONE, reason)


def effect_of_runs(
    metric: str,
    kind: Kind,
    margin: float,
    reference_KS: Sequence[Numbers],
    candidate_KS: Sequence[Numbers],
    *,
    paired: bool,
) -> Effect:
    """From several runs a side, or from several of the reference against one: the spread between runs counts.

    `paired`: the k-th runs of both sides share their seed and stayed together.
    """
    windows = []
    needed = None
    for window in _DECIDE:
        a_K, b_K = (
            np.array([_window_mean(x_S, window) for x_S in side]) for side in (reference_KS, candidate_KS)
        )
        difference, spread, degrees = _spread(a_K, b_K, paired=paired)
        within_run = None if paired else _noise_within_runs(window, reference_KS, candidate_KS)
        deviation = _with_prior(a_K, b_K, within_run, margin)
        half_at = partial(_student_half, spread, degrees)
        error = 1 - thresholds.CONFIDENCE
        # A prior is there to make few runs useful: where their spread alone says more, it stands.
        if deviation and _normal_half(deviation, error) < half_at(error):
            half_at, degrees, spread = partial(_normal_half, deviation), math.inf, deviation
        half = wide_enough(difference, half_at, _ALARMS[window], margin)
        chance = _chance(difference, spread, degrees)
        windows.append(
            WindowEffect(
                window,
                float(a_K.mean()),
                float(b_K.mean()),
                difference,
                Interval(difference - half, difference + half),
                chance,
            )
        )
        if len(b_K) > 1:
            more = _runs_to_decide(a_K, b_K, margin - abs(difference), paired=paired)
            needed = more if needed is None or more is None else max(needed, more)
    evidence = _evidence(len(reference_KS), len(candidate_KS), paired=paired)
    effects_by_window = tuple(windows)
    verdict = _answer(effects_by_window, margin)
    more = needed if verdict == "inconclusive" else None
    return Effect(metric, kind, margin, verdict, effects_by_window, evidence, runs_to_decide=more)


@dataclass(frozen=True)
class Reruns:
    """Runs of the reference alone, and how far a further one may be from their mean."""

    curves_KS: Sequence[Numbers]
    mean: dict[str, float]
    """By window."""
    spread: dict[str, float]
    """Standard error of the difference between one further run's mean and that of these, by window."""

    @property
    def degrees(self) -> int:
        return len(self.curves_KS) - 1

    def reach(self, margin: float, alarm: float) -> tuple[float, float]:
        """Differences of a further run up to which it is equivalent, negative if none, and beyond which it
        is different."""
        spread = max(self.spread.values())
        half = _student_half(spread, self.degrees, 1 - thresholds.CONFIDENCE)
        return margin - half, max(margin + half, _student_half(spread, self.degrees, alarm))


def reruns_of(curves_KS: Sequence[Numbers]) -> Reruns:
    """Three or more; of one value each if they are validations."""
    mean, spread = {}, {}
    for name in (VALIDATION,) if len(curves_KS[0]) == 1 else _DECIDE:
        window = WHOLE if name == VALIDATION else name
        a_K = np.array([_window_mean(x_S, window) for x_S in curves_KS])
        # Few runs may be alike by chance; the noise between their steps says how alike they can be.
        within_run = _noise_within_runs(window, curves_KS[:-1], curves_KS[1:]) or 0.0
        mean[name] = float(a_K.mean())
        spread[name] = max(float(a_K.std(ddof=1)), within_run) * math.sqrt(1 + 1 / len(a_K))
    return Reruns(curves_KS, mean, spread)


def effect_against_reruns(
    metric: str, kind: Kind, margin: float, reruns: Reruns, run_S: Numbers, alarm: float
) -> Effect:
    """One run against several of the reference alone, by the interval that a further rerun would lie in.

    `alarm`: how often a window of a further rerun may lie beyond the margin. Over many nights it is far in
    the tails, where only the spread between runs says something: Student's t, and no prior.
    """
    windows, count = [], len(reruns.curves_KS)
    for name, mean in reruns.mean.items():
        value, spread = _window_mean(run_S, WHOLE if name == VALIDATION else name), reruns.spread[name]
        difference = value - mean
        half = wide_enough(difference, partial(_student_half, spread, reruns.degrees), alarm, margin)
        interval = Interval(difference - half, difference + half)
        chance = _chance(difference, spread, reruns.degrees)
        windows.append(WindowEffect(name, mean, value, difference, interval, chance))
    reason = _flat(reruns.curves_KS[0], run_S)
    verdict = "different" if reason else _answer(windows, margin)
    more = None
    if verdict == "inconclusive":
        one = [reruns.spread[window.window] / math.sqrt(1 + 1 / count) for window in windows]
        needed = max(
            _reruns_to_decide(deviation, margin - abs(window.difference))
            for deviation, window in zip(one, windows, strict=True)
        )
        more = needed if count < needed <= _MOST_RUNS else None
    evidence = _evidence(count, 1, paired=False)
    return Effect(metric, kind, margin, verdict, tuple(windows), evidence, reason, more)


def _reruns_to_decide(deviation: float, room: float) -> int:
    """Runs of the reference with which the interval of one further run would fit into the room."""
    from scipy.special import stdtrit

    if room <= 0:
        return _MOST_RUNS + 1
    counts = np.arange(thresholds.FEWEST_RUNS, _MOST_RUNS + 1)
    halves = stdtrit(counts - 1, (1 + thresholds.CONFIDENCE) / 2) * deviation * np.sqrt(1 + 1 / counts)
    fits = halves <= room
    return int(counts[np.argmax(fits)]) if fits.any() else _MOST_RUNS + 1


def effect_of_validations(
    metric: str,
    margin: float,
    reference_P: Numbers,
    candidate_P: Numbers,
    *,
    items: int | None,
) -> Effect:
    """From the last quarter of the validations of one run a side.

    Scores between 0 and 1 have an interval if the number of validated items is known. Validations repeat the
    same items, so more of them do not make it narrower.
    """
    last = -max(1, len(reference_P) // 4)
    a, b = float(reference_P[last:].mean()), float(candidate_P[last:].mean())
    interval, chance = None, math.nan
    if items is not None and min(a, b) >= 0 and max(a, b) <= 1:
        middle, deviation = _binomial(a, b, items)
        half = wide_enough(middle, partial(_normal_half, deviation), _ALARMS[VALIDATION], margin)
        interval, chance = Interval(middle - half, middle + half), _chance(middle, deviation, math.inf)
    windows = (WindowEffect(VALIDATION, a, b, b - a, interval, chance),)
    return Effect(metric, "score", margin, _answer(windows, margin), windows, ALONE)


def _binomial(a: float, b: float, items: int) -> tuple[float, float]:
    """Middle and standard error of `b - a` by Agresti and Caffo."""
    shares = [(share * items + 1) / (items + 2) for share in (a, b)]
    spread = math.sqrt(sum(share * (1 - share) / (items + 2) for share in shares))
    return shares[1] - shares[0], spread


def _answer(windows: Sequence[WindowEffect], margin: float) -> Answer:
    """By the intervals that are shown. Without a chance, the steps are too few to show a difference."""
    for one in windows:
        beyond = one.interval is not None and (one.interval.low > margin or one.interval.high < -margin)
        if beyond and not math.isnan(one.chance):
            return "different"
    deciding = [one.interval for one in windows if one.window in _DECIDING]
    within = all(i is not None and -margin <= i.low and i.high <= margin for i in deciding)
    return "equivalent" if within else "inconclusive"


def _flat(reference_S: Numbers, candidate_S: Numbers) -> str:
    """A curve that hardly moves from step to step beside one that does."""
    if len(reference_S) < thresholds.FEWEST_STEPS:
        return ""
    # Not the largest, which is one spike; not the median, which is 0 for rewards that have reached their top.
    moves = [float(np.quantile(np.abs(np.diff(x_S)), 0.9)) for x_S in (reference_S, candidate_S)]
    for role, moved, other in (("candidate", moves[1], moves[0]), ("reference", moves[0], moves[1])):
        if other > 0 and moved < thresholds.FLAT * other:
            return tr(
                "the {role}'s curve is flat: it does not change from step to step as the other does",
                role=ROLES[role],
            )
    return ""


def _window_mean(values_S: Numbers, window: str) -> float:
    return float(windows_of(len(values_S)).weights_WS[WINDOWS.index(window)] @ values_S)


def _spread(a_K: Numbers, b_K: Numbers, *, paired: bool) -> tuple[float, float, float]:
    """Difference of the means, its standard error and its degrees of freedom."""
    if paired:
        each_K = b_K - a_K
        return float(each_K.mean()), float(each_K.std(ddof=1)) / math.sqrt(len(each_K)), len(each_K) - 1
    difference = float(b_K.mean() - a_K.mean())
    if len(b_K) == 1:
        return difference, float(a_K.std(ddof=1)) * math.sqrt(1 + 1 / len(a_K)), len(a_K) - 1
    # Welch: the two sides need not vary alike.
    parts = [float(x_K.var(ddof=1)) / len(x_K) for x_K in (a_K, b_K)]
    total = sum(parts)
    if not total:
        return difference, 0.0, len(a_K) + len(b_K) - 2
    degrees = total**2 / sum(p**2 / (len(x) - 1) for p, x in zip(parts, (a_K, b_K), strict=True))
    return difference, math.sqrt(total), degrees


def _student_half(spread: float, degrees: float, error: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - error / 2)) * spread


def _normal_half(deviation: float, error: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(1 - error / 2)) * deviation


def _chance(difference: float, spread: float, degrees: float) -> float:
    """How often there would be such a difference without a real one."""
    from scipy.special import stdtr

    if not spread:
        return 1.0 if not difference else 0.0
    return float(2 * stdtr(degrees, -abs(difference) / spread))


def _noise_within_runs(
    window: str, reference_KS: Sequence[Numbers], candidate_KS: Sequence[Numbers]
) -> float | None:
    """Standard deviation of one run's mean by the noise between its steps; None where there are too few."""
    if len(candidate_KS[0]) < thresholds.FEWEST_STEPS:
        return None
    at, halves = WINDOWS.index(window), []
    for number, reference_S in enumerate(reference_KS[: thresholds.PRIOR_RUNS]):
        mean = window_means(candidate_KS[min(number, len(candidate_KS) - 1)] - reference_S)[at]
        assert mean.interval is not None
        halves.append(mean.interval.high - mean.value)
    return float(np.sqrt(np.mean(np.square(halves)) / 2)) / _NORMAL_HALF


def _with_prior(a_K: Numbers, b_K: Numbers, within_run: float | None, margin: float) -> float | None:
    """Standard error of the difference, if the spread between runs agrees with what is known without it.

    That is the noise within a run or, if the spread contradicts it, a usual spread on top of it. It weighs as
    `thresholds.PRIOR_RUNS` runs do: the spread of two reruns alone gives an interval of no use.
    """
    from scipy.special import chdtrc

    degrees = len(a_K) + len(b_K) - 2
    if not within_run or not degrees:
        return None
    squares = sum(float(((x_K - x_K.mean()) ** 2).sum()) for x_K in (a_K, b_K))
    for expected in (within_run, math.hypot(within_run, thresholds.USUAL_SPREAD * margin)):
        relative = squares / expected**2
        if float(chdtrc(degrees, relative)) >= thresholds.CONFLICT:
            share = (thresholds.PRIOR_RUNS + relative) / (thresholds.PRIOR_RUNS + degrees)
            return expected * math.sqrt(share * (1 / len(a_K) + 1 / len(b_K)))
    return None


def _runs_to_decide(a_K: Numbers, b_K: Numbers, room: float, *, paired: bool) -> int | None:
    """The number of runs a side with which the interval would fit into the room that the margin leaves."""
    from scipy.special import stdtrit

    if room <= 0:
        return None
    each = float((b_K - a_K).var(ddof=1)) if paired else float(a_K.var(ddof=1) + b_K.var(ddof=1))
    for runs in range(2, _MOST_RUNS + 1):
        degrees = runs - 1 if paired else 2 * (runs - 1)
        if float(stdtrit(degrees, (1 + thresholds.CONFIDENCE) / 2)) * math.sqrt(each / runs) <= room:
            return runs
    return None


def _evidence(references: int, candidates: int, *, paired: bool) -> str:
    if paired:
        return tr("{count} pairs of runs with the same seeds", count=references)
    if candidates == 1:
        return tr("{count} runs of the reference, one of the candidate", count=references)
    return tr(
        "{references} runs of the reference, {candidates} of the candidate",
        references=references,
        candidates=candidates,
    )


def values_of(metric: str, runs: Sequence[RunLog]) -> list[Numbers]:
    """Each run's values of a metric, at the steps that all of them have."""
    return common([run.metrics[metric] for run in runs])[1]
