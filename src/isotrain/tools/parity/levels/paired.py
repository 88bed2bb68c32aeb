"""P2: what two paired curves tell about the computation: the same, different, or too close to call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isotrain.language import tr
from isotrain.tools.parity import thresholds
from isotrain.tools.parity.compare.comparison import Aligned, Comparison, align
from isotrain.tools.parity.compare.noise import WINDOWS, alarm_shares, window_means
from isotrain.tools.parity.compare.objections import watched_kind
from isotrain.tools.parity.compare.published import kind_of
from isotrain.tools.parity.compare.statistics import Apart, apart
from isotrain.tools.parity.levels.level import Check, Level, State, not_run
from isotrain.tools.parity.run import RunLog, common

# A hostile log may have any number of metrics.
_MOST_COMPUTED = 8
_ONE_SIGN = tr("the update: learning rate, optimizer or gradient scaling")
_COMPUTED = ("grad_norm", "entropy")
"""What each step computes, whatever the responses: rewards of replayed responses are equal by themselves, and
so is the policy loss where a step has one update."""
_FROM_THE_START = tr("the loss itself: its mask, its scale or the model's layers, wrong from the first step")


@dataclass(frozen=True)
class _Signed:
    """The clearest difference of one sign in a window of the run, beside the size that rounding may have."""

    window: str
    mean: float
    floor: float
    significant: bool
    """Whether noise without a sign does not explain it."""


def paired_level(comparison: Comparison, members: Sequence[RunLog] = ()) -> Level:
    """`members` are runs that only round otherwise than the reference: what they do is allowed."""
    if not comparison.curves:
        return not_run("P2", tr("the runs have no curve to compare"))
    limits = {name: _limits(name, comparison, members) for name in comparison.curves}
    signed = {name: _signed(name, comparison) for name in comparison.curves}
    checks = tuple(
        check
        for name, apart_by in comparison.curves.items()
        for check in _checks(name, apart_by, limits[name], signed[name])
    )
    states = {
        name: _state(apart_by, limits[name], signed[name]) for name, apart_by in comparison.curves.items()
    }
    apart_names = [name for name, state in states.items() if state == "different"]
    if apart_names:
        first = apart_names[0]
        words, causes = _parting(first, comparison.curves[first], limits[first], signed[first])
        return Level("P2", "different", words, checks, causes, {"apart": apart_names})
    computed = _computed(comparison)
    for name, curve in computed.items():
        if (change := _change_of_first(curve)) is not None and abs(change) > thresholds.FIRST_STEP:
            words = tr("{metric} is {percent:+.0f} % at the first step", metric=name, percent=100 * change)
            return Level("P2", "different", words, checks, (_FROM_THE_START,), {"apart": [name]})
    curves = dict(comparison.curves)
    for name, curve in computed.items():
        curves[name] = apart(curve.steps_S, curve.reference_S, curve.candidate_S)
        states[name] = _by_curve(curves[name])
    if not computed and any(kind_of(name) == "reward" for name in curves):
        words = tr("the curves follow from the responses; gradient norm and entropy are not in both runs")
        return Level("P2", "cannot tell", words, checks)
    state: State = "cannot tell" if "cannot tell" in states.values() else "same"
    worst = max(curves, key=lambda name: curves[name].share_of_flat or 0.0)
    return Level("P2", state, _together(worst, curves[worst], state), checks)


def _computed(comparison: Comparison) -> dict[str, Aligned]:
    reference, candidate = comparison.reference, comparison.candidate
    names = [
        name
        for name in reference.metrics
        if name in candidate.metrics and name not in comparison.curves and watched_kind(name) in _COMPUTED
    ]
    aligned = {name: align(name, reference, candidate) for name in names[:_MOST_COMPUTED]}
    # All zeros are no evidence: a run without gradients.
    return {name: curve for name, curve in aligned.items() if len(curve.steps_S) and curve.reference_S.any()}


def _change_of_first(curve: Aligned) -> float | None:
    """Relative, of a step that both began with the same weights."""
    if curve.steps_S[0] > 1 or not curve.reference_S[0]:
        return None
    return float(curve.candidate_S[0] / curve.reference_S[0] - 1)


@dataclass(frozen=True)
class _PairedLimits:
    correlation: float
    share: float


def _limits(metric: str, comparison: Comparison, members: Sequence[RunLog]) -> _PairedLimits:
    """Some trainings part by rounding alone: where the members do so, the candidate may."""
    correlations, shares = [1.0], [0.0]
    for member in members:
        if metric in member.metrics and metric in comparison.reference.metrics:
            steps_S, (a_S, b_S) = common([comparison.reference.metrics[metric], member.metrics[metric]])
            if len(steps_S) and np.isfinite(a_S).all() and np.isfinite(b_S).all():
                noise = apart(steps_S, a_S, b_S)
                correlations.append(1.0 if noise.change_correlation is None else noise.change_correlation)
                shares.append(noise.share_of_flat or 0.0)
    slack = thresholds.MEMBER_SLACK
    return _PairedLimits(
        min(thresholds.DIFFERENT_CORRELATION, 1 - slack * (1 - min(correlations))),
        max(thresholds.DIFFERENT_SHARE, slack * max(shares)),
    )


def _signed(metric: str, comparison: Comparison) -> _Signed:
    aligned = comparison.aligned[metric]
    means = window_means(aligned.candidate_S - aligned.reference_S)
    floor = thresholds.FLOOR * float(np.abs(aligned.reference_S).mean())
    limit = thresholds.FALSE_ALARMS / len(comparison.curves)
    shares = alarm_shares(len(means))
    clear = [mean.chance < limit * share for mean, share in zip(means, shares, strict=True)]
    # The whole run, unless only quarters of it show what noise does not explain: then the largest of those.
    quarters = [at for at in range(1, len(means)) if clear[at]]
    best = max(quarters, key=lambda at: abs(means[at].value)) if quarters and not clear[0] else 0
    return _Signed(WINDOWS[best], means[best].value, floor, clear[best])


def _state(apart_by: Apart, limits: _PairedLimits, signed: _Signed) -> State:
    correlation, share = apart_by.change_correlation, apart_by.share_of_flat
    if signed.significant and abs(signed.mean) > signed.floor:
        return "different"
    if not apart_by.mean_absolute or correlation is None or share is None:
        return _by_curve(apart_by)
    if correlation < min(thresholds.OTHER_DATA, limits.correlation):
        return "different"
    # Where a curve hardly changes, honest rounding is a large part of its changes.
    if apart_by.mean_absolute > signed.floor and (correlation < limits.correlation or share > limits.share):
        return "different"
    return _by_curve(apart_by)


def _by_curve(apart_by: Apart) -> State:
    """Without anything that makes a pair different."""
    correlation, share = apart_by.change_correlation, apart_by.share_of_flat
    if not apart_by.mean_absolute:
        return "same"
    if correlation is None or share is None:
        return "cannot tell"
    alike = correlation >= thresholds.SAME_CORRELATION and share <= thresholds.SAME_SHARE
    return "same" if alike else "cannot tell"


def _checks(name: str, apart_by: Apart, limits: _PairedLimits, signed: _Signed) -> list[Check]:
    checks = []
    if apart_by.change_correlation is not None:
        value = apart_by.change_correlation
        note = tr("at least; {limit} for the same by curves alone", limit=thresholds.SAME_CORRELATION)
        passed = value >= limits.correlation
        what = tr("{metric}: correlation of changes", metric=name)
        checks.append(Check(what, value, limits.correlation, passed, note))
    if apart_by.share_of_flat is not None:
        share = apart_by.share_of_flat
        note = tr("at most; {limit} for the same by curves alone", limit=thresholds.SAME_SHARE)
        what = tr("{metric}: share of a flat line's error", metric=name)
        checks.append(Check(what, share, limits.share, share <= limits.share, note))
    size = abs(signed.mean)
    what = tr("{metric}: mean difference, {window}", metric=name, window=signed.window)
    note = tr("at most, unless it has no lasting sign; noise explains it")
    if signed.significant:
        note = tr("at most, unless it has no lasting sign; noise does not explain it")
    checks.append(Check(what, size, signed.floor, not (signed.significant and size > signed.floor), note))
    return checks


def _together(name: str, apart_by: Apart, state: State) -> str:
    distance, correlation = 100 * apart_by.mean_absolute, apart_by.change_correlation
    how = tr("{metric} is {distance:.2g} hundredths apart on average", metric=name, distance=distance)
    if correlation is not None:
        how = tr(
            "{metric} is {distance:.2g} hundredths apart on average, changes correlate {correlation:.5f}",
            metric=name,
            distance=distance,
            correlation=correlation,
        )
    if state == "same":
        return tr("the curves agree ({how})", how=how)
    return tr("the curves are close ({how}), but small mistakes can be as close", how=how)


def _parting(
    name: str, apart_by: Apart, limits: _PairedLimits, signed: _Signed
) -> tuple[str, tuple[str, ...]]:
    correlation = apart_by.change_correlation
    if correlation is not None and correlation < min(thresholds.OTHER_DATA, limits.correlation):
        words = tr(
            "{metric} goes up and down at other steps (changes correlate {correlation:.2f})",
            metric=name,
            correlation=correlation,
        )
        return words, (tr("other data, or another order of it"),)
    from_start = apart_by.first * apart_by.signed_mean > 0.5 * apart_by.signed_mean**2
    causes = (_FROM_THE_START if from_start else _ONE_SIGN,)
    if signed.significant and abs(signed.mean) > signed.floor:
        return _shifted(name, signed), causes
    distance = 100 * apart_by.mean_absolute
    how = tr("{distance:.2g} hundredths apart on average", distance=distance)
    if correlation is not None:
        how = tr(
            "{distance:.2g} hundredths apart on average, changes correlate {correlation:.3f}",
            distance=distance,
            correlation=correlation,
        )
    if apart_by.parts_at is None:
        return tr("the curves of {metric} do not agree ({how})", metric=name, how=how), causes
    parting = tr(
        "the curves of {metric} part at step {step} ({how})", metric=name, step=apart_by.parts_at, how=how
    )
    return parting, causes


def _shifted(metric: str, signed: _Signed) -> str:
    size, window = abs(signed.mean), signed.window
    if signed.mean > 0:
        return tr(
            "{metric} is {size:.2g} higher throughout the {window}", metric=metric, size=size, window=window
        )
    return tr("{metric} is {size:.2g} lower throughout the {window}", metric=metric, size=size, window=window)
