"""The first question: do the two runs end up alike, within the margin that somebody cares about?

Runs are paired if they went through the same data step by step, free-running if they sampled responses of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from isotrain.errors import DataError
from isotrain.language import tr
from isotrain.tools.parity import thresholds
from isotrain.tools.parity.compare.comparison import Comparison
from isotrain.tools.parity.compare.effects import (
    VALIDATION,
    Answer,
    Effect,
    effect_against_reruns,
    effect_of_curves,
    effect_of_runs,
    effect_of_validations,
    reruns_of,
    values_of,
)
from isotrain.tools.parity.compare.objections import Objection
from isotrain.tools.parity.compare.published import kind_of
from isotrain.tools.parity.compare.statistics import correlation
from isotrain.tools.parity.run import Numbers, RunLog, common, section
from isotrain.tools.parity.thresholds import Kind

Pairing = Literal["paired", "free-running"]
PAIRINGS: dict[Pairing, str] = {"paired": tr("paired"), "free-running": tr("free-running")}

# What only runs that sample have in their logs, by their names in verl, OpenRLHF, TRL and isotrain.
_SAMPLED = re.compile(
    r"(^|/)(response_length|completions?|completion_length|num_tokens_generated|pg_loss|ppo_kl|advantages?)(/|$)"
    r"|(^|/)(policy_loss|act_loss|pg_clipfrac|response_length_mean|rollout_logp_diff_mean)$"
)

# Scores alone: other figures of a validation are no measure of quality.
_SCORE = re.compile(
    r"^val-core/.+@\d+(/mean)?$|^val/(accuracy|f1|test_score/.+)$|^eval/eval_.*(pass\d+|acc(uracy)?|score)$"
)
# A hostile log may have any number of them.
_MOST_SCORES = 64
_TYPED = re.compile(r"(?P<metric>.+)=(?P<value>[0-9.eE+-]+)")


def pairing_of(reference: RunLog, candidate: RunLog, *, free: bool = False) -> Pairing:
    """`free` says that they are free-running, whatever the runs look like."""
    if free:
        return "free-running"
    if not (_samples(reference) and _samples(candidate)):
        return "paired"
    return "paired" if _together(reference, candidate) else "free-running"


def _samples(run: RunLog) -> bool:
    """Whether a run trains on responses that it sampled."""
    if run.recipe is not None:
        rollout = section(run.recipe, "rollout")
        return bool(rollout) and rollout.get("replay") is None
    return any(_SAMPLED.search(name) or kind_of(name) == "reward" for name in run.metrics)


def _together(reference: RunLog, candidate: RunLog) -> bool:
    """Whether every loss and reward changes alike: they sampled the same, or one replayed the other."""
    correlations = []
    for name, series in reference.metrics.items():
        if kind_of(name) is None or name not in candidate.metrics:
            continue
        _, (a_S, b_S) = common([series, candidate.metrics[name]])
        changes = correlation(a_S[1:] - a_S[:-1], b_S[1:] - b_S[:-1])
        if changes is not None:
            correlations.append(changes)
    return bool(correlations) and min(correlations) >= thresholds.DIFFERENT_CORRELATION


@dataclass(frozen=True)
class Outcome:
    verdict: Answer
    effects: tuple[Effect, ...]
    """The metric that decides first, then the others."""
    pairing: Pairing
    broken: tuple[str, ...] = ()
    """Metrics that are not a number on one side, in words."""
    objections: tuple[Objection, ...] = ()
    """Why it is at most inconclusive."""

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "pairing": self.pairing,
            "broken": list(self.broken),
            "objections": [asdict(objection) for objection in self.objections],
            "effects": {effect.metric: effect.as_json() for effect in self.effects},
        }


@dataclass(frozen=True)
class Baseline:
    """Reruns of a reference, and how often one more of them may be called different."""

    reruns: Sequence[RunLog]
    nights: int
    false_alarms: float
    """In so many nights without a difference."""

    def alarm(self, metrics: int) -> float:
        """The share of them for one window of one metric: the whole run and its last quarter decide."""
        return self.false_alarms / self.nights / (2 * max(1, metrics))


@dataclass(frozen=True)
class OtherRuns:
    """Runs besides the two that are compared."""

    reruns: Sequence[RunLog] = ()
    """Further runs of the reference."""
    pairs: Sequence[tuple[RunLog, RunLog]] = ()
    """Further runs of reference and candidate, with other seeds."""
    baseline: Baseline | None = None
    """Reruns that stand for the reference, at the same steps."""


NO_OTHERS = OtherRuns()


def outcome_of(
    comparison: Comparison,
    pairing: Pairing,
    others: OtherRuns = NO_OTHERS,
    margins: Mapping[str, float] | None = None,
    items: int | None = None,
) -> Outcome:
    """From the curves of both runs, or from several runs where there are some.

    `items`: how many rows were validated on.
    """
    one_sided = tuple(one.words for one in comparison.not_numbers if one.one_sided)
    stated = margins or {}
    effects = tuple(_effects(comparison, pairing, others, stated, items))
    answer: Answer = "inconclusive"
    clear = [one for one in effects if one.verdict == "different" and _accuses(one, effects, pairing, stated)]
    if one_sided or clear:
        answer = "different"
    elif effects and not comparison.not_numbers:
        known = [effect for effect in effects if effect.windows[0].interval is not None] or effects
        deciding = [effect for effect in known if _decides(effect, effects, pairing, stated)]
        answer = (
            "equivalent" if all(effect.verdict == "equivalent" for effect in deciding) else "inconclusive"
        )
    order = sorted(
        effects,
        key=lambda one: (
            one.windows[0].interval is None,
            one.verdict != answer,
            not _decides(one, effects, pairing, stated),
        ),
    )
    objections = (*comparison.objections, *_validation_objections(comparison, effects))
    verdict = "inconclusive" if answer == "equivalent" and objections else answer
    return Outcome(verdict, tuple(order), pairing, one_sided, objections)


def _accuses(
    effect: Effect, effects: Sequence[Effect], pairing: Pairing, stated: Mapping[str, float]
) -> bool:
    """Metrics that do not decide are many and noisy: they must differ far more clearly."""
    chance = min(window.chance for window in effect.windows)
    return _decides(effect, effects, pairing, stated) or bool(effect.reason) or chance < thresholds.CLEAR


def _decides(
    effect: Effect, effects: Sequence[Effect], pairing: Pairing, stated: Mapping[str, float]
) -> bool:
    """A free-running policy loss says little about how good a run is: rewards decide, if there are some."""
    if effect.metric in stated or pairing == "paired":
        return True
    return effect.kind != "loss" or all(other.kind == "loss" for other in effects)


def _validation_objections(comparison: Comparison, effects: Sequence[Effect]) -> Iterator[Objection]:
    """Validations whose noise is unknown, and that are further apart than the margin."""
    for effect in effects:
        one = effect.windows[0]
        unknown = one.window == VALIDATION and one.interval is None
        if unknown and abs(one.difference) > effect.margin and "validation" not in comparison.intended:
            words = tr(
                "{metric} is {candidate:.3g} and the reference's {reference:.3g} in the last validations; "
                "--items N says how many rows they have",
                metric=effect.metric,
                candidate=one.candidate,
                reference=one.reference,
            )
            yield Objection("validation", words)


def _effects(
    comparison: Comparison,
    pairing: Pairing,
    others: OtherRuns,
    margins: Mapping[str, float],
    items: int | None,
) -> Iterator[Effect]:
    if others.baseline is not None:
        yield from _effects_against(others.baseline, comparison, margins)
        return
    free = pairing == "free-running"
    pairs = [(comparison.reference, comparison.candidate), *others.pairs]
    # Where curves are paired, reruns are the envelope of the computation.
    reruns = others.reruns if free else ()
    same_as = _same_values(comparison)
    for metric in comparison.curves:
        kind: Kind = kind_of(metric) or "score"
        margin = margins.get(metric, thresholds.MARGINS[kind])
        one = comparison.aligned[metric]
        effect = effect_of_curves(metric, kind, margin, one.reference_S, one.candidate_S)
        runs_a, runs_b = [*(a for a, _ in pairs), *reruns], [b for _, b in pairs]
        more = len(runs_a) >= (2 if free else thresholds.FEWEST_RUNS)
        if more and not effect.reason and _all_have(metric, [*runs_a, *runs_b]):
            values = values_of(metric, [*runs_a, *runs_b])
            a, b = values[: len(runs_a)], values[len(runs_a) :]
            alone = effect.verdict
            effect = replace(effect_of_runs(metric, kind, margin, a, b, paired=not free), alone=alone)
        yield replace(effect, same_as=same_as.get(metric))
    for metric in _scores(pairs):
        if metric in comparison.curves:
            continue
        margin = thresholds.MARGINS["score"]
        if len(pairs) >= thresholds.FEWEST_RUNS:
            a, b = ([pair[side].metrics[metric].values_S[-1:] for pair in pairs] for side in (0, 1))
            yield effect_of_runs(metric, "score", margin, a, b, paired=False)
            continue
        steps_S, (a_P, b_P) = common([run.metrics[metric] for run in pairs[0]])
        if len(steps_S) and np.isfinite([a_P, b_P]).all():
            yield effect_of_validations(metric, margin, a_P, b_P, items=items)


def _effects_against(
    baseline: Baseline, comparison: Comparison, margins: Mapping[str, float]
) -> Iterator[Effect]:
    candidate, same_as = comparison.candidate, _same_values(comparison)
    runs = [*baseline.reruns, candidate]
    scores = [metric for metric in _scores([(baseline.reruns[0], candidate)]) if metric not in same_as]
    scores = [metric for metric in scores if metric not in comparison.curves]
    alarm = baseline.alarm(len(comparison.curves) - len(same_as) + len(scores))
    for metric, one in comparison.aligned.items():
        kind: Kind = kind_of(metric) or "score"
        margin = margins.get(metric, thresholds.MARGINS[kind])
        *reruns, run_S = [values_S[: len(one.steps_S)] for values_S in values_of(metric, runs)]
        effect = effect_against_reruns(metric, kind, margin, reruns_of(reruns), run_S, alarm)
        yield replace(effect, same_as=same_as.get(metric))
    for metric in scores:
        values = values_of(metric, runs)
        if len(values[0]) and np.isfinite(values[-1]).all():
            *last, run_P = map(last_validations, values)
            margin = margins.get(metric, thresholds.MARGINS["score"])
            yield effect_against_reruns(metric, "score", margin, reruns_of(last), run_P, alarm)


def _same_values(comparison: Comparison) -> dict[str, str]:
    """Metrics that are equal to an earlier one in every value of both runs, such as rewards and scores."""
    first: dict[tuple[bytes, bytes, bytes], str] = {}
    same: dict[str, str] = {}
    for metric, one in comparison.aligned.items():
        values = one.steps_S.tobytes(), one.reference_S.tobytes(), one.candidate_S.tobytes()
        if first.setdefault(values, metric) != metric:
            same[metric] = first[values]
    return same


def _all_have(metric: str, runs: Sequence[RunLog]) -> bool:
    return all(metric in run.metrics for run in runs)


def last_validations(values_P: Numbers) -> Numbers:
    """The mean of the last quarter of one run's scores."""
    return np.array([values_P[-max(1, len(values_P) // 4) :].mean()])


def is_score(metric: str) -> bool:
    return bool(_SCORE.match(metric))


def _scores(pairs: Sequence[tuple[RunLog, RunLog]]) -> list[str]:
    runs = [run for pair in pairs for run in pair]
    return [metric for metric in runs[0].metrics if is_score(metric) and _all_have(metric, runs)][
        :_MOST_SCORES
    ]


def margins_of(texts: Sequence[str], metrics: Sequence[str]) -> dict[str, float]:
    """`--margin METRIC=VALUE`; the metric may be `loss` or `reward` for all of that kind."""
    margins: dict[str, float] = {}
    for text in texts:
        typed = _TYPED.fullmatch(text)
        try:
            value = float(typed["value"]) if typed else float("nan")
        except ValueError:
            value = float("nan")
        if typed is None or not value >= 0:
            raise DataError(f"--margin {text}: write METRIC=VALUE, such as reward=0.04")
        name = typed["metric"]
        meant = [metric for metric in metrics if name in (metric, kind_of(metric))]
        if not meant:
            raise DataError(f"--margin {text}: no such metric is compared; there are {', '.join(metrics)}")
        margins |= dict.fromkeys(meant, value)
    return margins
