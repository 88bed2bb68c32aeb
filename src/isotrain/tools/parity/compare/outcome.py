"""The first question: do the two runs end up alike, within the margin that somebody cares about?

Runs are paired if they went through the same data step by step, free-running if they sampled responses of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from isotrain.errors import DataError
from isotrain.language import tr
from isotrain.tools.parity import thresholds
from isotrain.tools.parity.compare.comparison import Comparison
from isotrain.tools.parity.compare.effects import Answer, Effect, effect_of_curves, effect_of_runs, values_of
from isotrain.tools.parity.compare.objections import Objection
from isotrain.tools.parity.compare.published import kind_of
from isotrain.tools.parity.compare.statistics import correlation
from isotrain.tools.parity.run import RunLog, common, section
from isotrain.tools.parity.thresholds import Kind

Pairing = Literal["paired", "free-running"]
PAIRINGS: dict[Pairing, str] = {"paired": tr("paired"), "free-running": tr("free-running")}

# What only runs that sample have in their logs, by their names in verl, OpenRLHF, TRL and isotrain.
_SAMPLED = re.compile(
    r"(^|/)(response_length|completions?|completion_length|num_tokens_generated|pg_loss|ppo_kl|advantages?)(/|$)"
    r"|(^|/)(policy_loss|act_loss|pg_clipfrac|response_length_mean|rollout_logp_diff_mean)$"
)

# Scores alone: other figures of a validation are no measure of quality.
_SCORE = re.compile(r"^val-core/.+@\d+$|^val/(accuracy|f1)$")
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
class OtherRuns:
    """Runs besides the two that are compared."""

    reruns: Sequence[RunLog] = ()
    """Further runs of the reference."""
    pairs: Sequence[tuple[RunLog, RunLog]] = ()
    """Further runs of reference and candidate, with other seeds."""


NO_OTHERS = OtherRuns()


def outcome_of(
    comparison: Comparison,
    pairing: Pairing,
    others: OtherRuns = NO_OTHERS,
    margins: Mapping[str, float] | None = None,
) -> Outcome:
    """From the curves of both runs, or from several runs where there are some."""
    one_sided = tuple(value.words for value in comparison.not_numbers if value.one_sided)
    stated = margins or {}
    effects = tuple(_effects(comparison, pairing, others, stated))
    answer: Answer = "inconclusive"
    verdicts = {effect.verdict for effect in effects}
    if one_sided or "different" in verdicts:
        answer = "different"
    elif effects and not comparison.not_numbers:
        known = [effect for effect in effects if effect.windows[0].interval is not None] or effects
        deciding = [effect for effect in known if _decides(effect, effects, pairing, stated)]
        answer = (
            "equivalent" if all(effect.verdict == "equivalent" for effect in deciding) else "inconclusive"
        )
    order = sorted(
        effects, key=lambda effect: (effect.verdict != answer, not _decides(effect, effects, pairing, stated))
    )
    objections = comparison.objections
    verdict = "inconclusive" if answer == "equivalent" and objections else answer
    return Outcome(verdict, tuple(order), pairing, one_sided, objections)


def _decides(
    effect: Effect, effects: Sequence[Effect], pairing: Pairing, stated: Mapping[str, float]
) -> bool:
    """A free-running policy loss says little about how good a run is: rewards decide, if there are some."""
    if effect.metric in stated or pairing == "paired":
        return True
    return effect.kind != "loss" or all(other.kind == "loss" for other in effects)


def _effects(
    comparison: Comparison, pairing: Pairing, others: OtherRuns, margins: Mapping[str, float]
) -> Iterator[Effect]:
    free = pairing == "free-running"
    pairs = [(comparison.reference, comparison.candidate), *others.pairs]
    references = [comparison.reference, *others.reruns]
    metrics = list(comparison.curves)
    scores = _scores(pairs) if len(pairs) >= thresholds.FEWEST_RUNS else []
    tests = len(metrics) + len(scores)
    for metric in metrics:
        kind: Kind = kind_of(metric) or "score"
        margin = margins.get(metric, thresholds.MARGINS[kind])
        runs_a, runs_b = [a for a, _ in pairs], [b for _, b in pairs]
        if len(pairs) >= thresholds.FEWEST_RUNS and _all_have(metric, [*runs_a, *runs_b]):
            values = values_of(metric, [*runs_a, *runs_b])
            a, b = values[: len(pairs)], values[len(pairs) :]
            yield effect_of_runs(metric, kind, margin, a, b, paired=not free, tests=tests)
        elif free and len(references) >= thresholds.FEWEST_RUNS and _all_have(metric, references):
            *a, b_S = values_of(metric, [*references, comparison.candidate])
            yield effect_of_runs(metric, kind, margin, a, [b_S], paired=False, tests=tests)
        else:
            aligned = comparison.aligned[metric]
            curves = (aligned.reference_S, aligned.candidate_S)
            yield effect_of_curves(metric, kind, margin, *curves, free=free, tests=tests)
    for metric in scores:
        margin = margins.get(metric, thresholds.MARGINS["score"])
        a, b = ([pair[side].metrics[metric].values_S[-1:] for pair in pairs] for side in (0, 1))
        yield effect_of_runs(metric, "score", margin, a, b, paired=False, tests=tests)


def _all_have(metric: str, runs: Sequence[RunLog]) -> bool:
    return all(metric in run.metrics for run in runs)


def _scores(pairs: Sequence[tuple[RunLog, RunLog]]) -> list[str]:
    runs = [run for pair in pairs for run in pair]
    return [metric for metric in runs[0].metrics if _SCORE.match(metric) and _all_have(metric, runs)]


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
