"""The verdict in plain words: for somebody who decides, and does not read loss curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from isotrain.language import capital, listed, tr
from isotrain.tools.parity.compare.effects import ALONE, ANSWERS, VALIDATION, Answer, Effect, WindowEffect
from isotrain.tools.parity.compare.noise import WINDOWS
from isotrain.tools.parity.compare.objections import WATCHED

if TYPE_CHECKING:
    from isotrain.tools.parity.verdict import Same, Verdict

_Answer = TypeVar("_Answer")
_MOST_CAUSES = 3
# Between curves that are equal in every digit, an interval is as narrow as numbers can be told apart.
_NOTHING = 1e-100


OUTCOMES: dict[Answer, str] = {
    "equivalent": tr("Outcome: equivalent."),
    "different": tr("Outcome: different."),
    "inconclusive": tr("Outcome: inconclusive."),
}
COMPUTATIONS: dict[Same, str] = {
    "same": tr("Computation: the same."),
    "different": tr("Computation: different."),
    "inconclusive": tr("Computation: inconclusive."),
}


def headline(verdict: Verdict) -> str:
    """Both answers, and what to run to know more; a paragraph each."""
    answers = [outcome_words(verdict), computation_words(verdict)]
    return listed([*inputs_first(verdict, answers), *next_words(verdict)], "\n")


def inputs_first(verdict: Verdict, answers: Sequence[_Answer]) -> list[_Answer]:
    """Outcome and computation; where other inputs made another training, that is what to know first."""
    return list(reversed(answers)) if verdict.computation.inputs else list(answers)


def outcome_words(verdict: Verdict) -> str:
    return listed((OUTCOMES[verdict.outcome.verdict], outcome_reason(verdict)), " ")


def computation_words(verdict: Verdict) -> str:
    return listed((COMPUTATIONS[verdict.computation.verdict], computation_reason(verdict)), " ")


def outcome_reason(verdict: Verdict) -> str:
    """What keeps it from being equivalent comes first; where it is different anyway, last."""
    objections = [_sentence(words) for words in _objection_words(verdict)]
    found = listed((_difference_found(verdict), *_alone(verdict)), " ")
    parts = [found, *objections] if verdict.outcome.verdict == "different" else [*objections, found]
    return listed(parts, " ")


def _alone(verdict: Verdict) -> Iterator[str]:
    """The answer of one run a side, where further runs changed it."""
    for effect in verdict.outcome.effects[:1]:
        if effect.alone is not None and effect.alone != effect.verdict:
            yield tr("One run a side alone would be {answer}.", answer=ANSWERS[effect.alone])


def _objection_words(verdict: Verdict) -> Iterator[str]:
    objections = verdict.outcome.objections
    yield from (capital(one.words) for one in objections if one.name == "steps")
    yield from (one.words for one in objections if one.name == "validation")
    if wrong := [one.words for one in objections if one.name in WATCHED]:
        yield tr("Also looks wrong: {what}", what=listed(wrong, "; "))


def _difference_found(verdict: Verdict) -> str:
    outcome = verdict.outcome
    if outcome.broken:
        return _sentence(listed(outcome.broken, "; "))
    if not verdict.comparison.has_curves:
        return tr(
            "Dumps of single steps have no curves of loss or reward; compare the logs of both runs, with "
            "--dump A B for the dumps."
        )
    if not outcome.effects:
        return _sentence(verdict.comparison.not_numbers[0].words)
    first = outcome.effects[0]
    steps = _steps(verdict, first.metric)
    if outcome.verdict == "different":
        if first.reason:
            return listed((_sentence(listed((first.metric, first.reason), ": ")), steps), " ")
        beyond = tr(
            "{difference}, more than the margin of {margin:g}.",
            difference=_difference(first, first.worst),
            margin=first.margin,
        )
        return listed((beyond, steps), " ")
    if first.verdict == "equivalent":
        within = tr(
            "{difference}, within the margin of {margin:g}.",
            difference=_difference(first, first.windows[0]),
            margin=first.margin,
        )
        others = sum(not effect.same_as for effect in outcome.effects) - 1
        if others and all(effect.verdict == "equivalent" for effect in outcome.effects):
            return listed((within, tr("The same holds for {count} more metrics.", count=others), steps), " ")
        return listed((within, steps), " ")
    unclear = next((one for one in outcome.effects if one.verdict == "inconclusive"), first)
    beside = tr(
        "{difference}; the margin is {margin:g}.",
        difference=_difference(unclear, _widest(unclear)),
        margin=unclear.margin,
    )
    return listed((beside, _steps(verdict, unclear.metric)), " ")


def computation_reason(verdict: Verdict) -> str:
    computation = verdict.computation
    if computation.inputs or computation.broken:
        return _sentence(listed([*computation.inputs, *computation.broken], "; "))
    ran = [level for level in computation.levels if level.state != "not run"]
    if computation.verdict == "different":
        against = _sentence(listed([level.words for level in ran if level.state == "different"], "; "))
        if not computation.causes:
            return against
        likely = tr("Likely causes: {causes}.", causes=listed(computation.causes[:_MOST_CAUSES], "; "))
        return listed((against, likely), " ")
    if computation.verdict == "same":
        return _sentence(listed([level.words for level in ran if level.state == "same"], "; "))
    if verdict.outcome.pairing == "free-running":
        return tr("Each run sampled its own responses, so the curves cannot tell rounding from a mistake.")
    open_words = listed([level.words for level in ran if level.state == "cannot tell"], "; ")
    if open_words or not ran:
        return _sentence(open_words or tr("there is no evidence"))
    agree = _sentence(listed([level.words for level in ran], "; "))
    return listed((agree, tr("No level has followed whole runs.")), " ")


def next_words(verdict: Verdict) -> Iterator[str]:
    """Runs that would give the answer that is missing."""
    outcome, pairing = verdict.outcome, verdict.outcome.pairing
    effect = next((one for one in outcome.effects if one.verdict == "inconclusive"), None)
    alone = bool(outcome.effects) and outcome.effects[0].evidence == ALONE
    if pairing == "free-running" and alone:
        yield (
            tr(
                "The run-to-run spread is unknown from one run a side: another seed alone may move a "
                "run by more than the interval says. Two or more reruns of the reference (--rerun "
                "RUN) measure it."
            )
        )
    elif outcome.verdict == "inconclusive" and effect is not None and effect.runs_to_decide:
        yield tr(
            "To know more: about {runs_to_decide} runs of each side would decide ({metric}).",
            runs_to_decide=effect.runs_to_decide,
            metric=effect.metric,
        )
    elif outcome.verdict == "inconclusive" and effect is not None:
        yield tr("To know more: longer runs, or further seeds of both sides (--pair A B, repeated).")
    if verdict.computation.verdict != "inconclusive" or not verdict.comparison.has_curves:
        return
    if pairing == "free-running":
        yield tr(
            "To know more about the computation: train on the same responses (`parity record`, `replay`)."
        )
    elif verdict.level("P3").state == "not run":
        yield (
            tr(
                "To know more about the computation: three or more runs of the reference with another "
                "kernel, micro-batch or number of ranks (--rerun RUN), or layer traces of both "
                "(observe.layer_trace=3)."
            )
        )
    else:
        yield tr("To know more about the computation: layer traces of both runs (observe.layer_trace=3).")


def _difference(effect: Effect, one: WindowEffect) -> str:
    """`critic/rewards/mean is 0.107 lower on average (95 % interval -0.116 to -0.101)`."""
    metric, interval = effect.metric, one.interval
    if interval is not None and max(map(abs, (one.difference, interval.low, interval.high))) < _NOTHING:
        if one.window == WINDOWS[0]:
            return tr("{metric} is equal on average", metric=metric)
        return tr("{metric} is equal in the {window}", metric=metric, window=one.window)
    words = _moved(metric, one)
    if interval is None and one.window == VALIDATION:
        return words
    if interval is None:
        return tr("{words} (too few steps for an interval)", words=words)
    low, high = (_figure(bound, sign=True) for bound in (interval.low, interval.high))
    return tr("{words} (95 % interval {low} to {high})", words=words, low=low, high=high)


def _moved(metric: str, one: WindowEffect) -> str:
    size, higher = _figure(abs(one.difference)), one.difference > 0
    if one.window == WINDOWS[0]:
        if higher:
            return tr("{metric} is {size} higher on average", metric=metric, size=size)
        return tr("{metric} is {size} lower on average", metric=metric, size=size)
    if higher:
        return tr("{metric} is {size} higher in the {window}", metric=metric, size=size, window=one.window)
    return tr("{metric} is {size} lower in the {window}", metric=metric, size=size, window=one.window)


def _figure(value: float, *, sign: bool = False) -> str:
    """Two digits of what matters, without exponents where people would stumble over them."""
    if not math.isfinite(value):
        return tr("infinite")
    text = f"{value:.3g}" if abs(value) >= 1e-4 or not value else f"{value:.1e}"
    return f"+{text}" if sign and value > 0 else text


def _widest(effect: Effect) -> WindowEffect:
    """The window that keeps it from being equivalent."""

    def reach(one: WindowEffect) -> float:
        return math.inf if one.interval is None else max(abs(one.interval.low), abs(one.interval.high))

    return max((one for one in effect.windows if one.window not in WINDOWS[1:-1]), key=reach)


def _steps(verdict: Verdict, metric: str) -> str:
    one = verdict.comparison.aligned.get(metric)
    if one is None:
        return ""
    count = len(one.steps_S)
    if one.whole:
        return tr("Compared over all {count:,} steps.", count=count)
    return tr(
        "Compared over {count:,} steps: the reference has {reference:,}, the candidate {candidate:,}.",
        count=count,
        reference=one.of_reference,
        candidate=one.of_candidate,
    )


def _sentence(words: str) -> str:
    """Not in capitals: many begin with the name of a metric."""
    return words if words.endswith((".", "!", "?")) else tr("{words}.", words=words)
