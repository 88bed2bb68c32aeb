"""The two answers about a pair of runs, and their words: do they end up alike, is it the same computation?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

from isotrain.language import capital, listed, tr
from isotrain.tools.parity.compare.comparison import Comparison
from isotrain.tools.parity.compare.effects import ALONE, ANSWERS, VALIDATION, Answer, Effect, WindowEffect
from isotrain.tools.parity.compare.noise import WINDOWS
from isotrain.tools.parity.compare.objections import WATCHED
from isotrain.tools.parity.compare.outcome import Outcome
from isotrain.tools.parity.levels.level import LEVELS, Level, not_run

Same = Literal["same", "different", "inconclusive"]
Question = Literal["outcome", "computation"]
_Answer = TypeVar("_Answer")

# 2 is what commands end with that cannot be carried out, such as for a log that cannot be read.
EXIT_CODES: dict[Answer | Same, int] = {"equivalent": 0, "same": 0, "different": 1, "inconclusive": 3}
# Levels that follow a whole run: without one of them saying `same`, nobody has seen the training.
_WHOLE_RUNS = ("P2", "P3")
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
_REASONS: dict[tuple[Answer, Same | Literal["inputs"]], str] = {
    ("equivalent", "same"): tr("the runs end up alike, and the computation is the same"),
    ("equivalent", "different"): tr("the runs end up alike, though the computations differ"),
    ("equivalent", "inconclusive"): tr("the runs end up alike; whether they compute the same is open"),
    ("equivalent", "inputs"): tr("the runs end up alike, though their inputs differ"),
    ("different", "same"): tr("the runs end up apart, though the computation is the same"),
    ("different", "different"): tr("the runs end up apart, and the computations differ"),
    ("different", "inconclusive"): tr("the runs end up apart; whether they compute the same is open"),
    ("different", "inputs"): tr("the runs end up apart, and their inputs differ"),
    ("inconclusive", "same"): tr("the computation is the same; whether the runs end up alike is open"),
    ("inconclusive", "different"): tr("the computations differ; whether the runs end up alike is open"),
    ("inconclusive", "inconclusive"): tr("whether the runs end up alike and compute the same is open"),
    ("inconclusive", "inputs"): tr("the inputs differ; whether the runs end up alike is open"),
}


@dataclass(frozen=True)
class Computation:
    verdict: Same
    levels: tuple[Level, ...]
    """All of `LEVELS`, in their order."""
    inputs: tuple[str, ...] = ()
    """Inputs of the runs that differ, in words."""
    broken: tuple[str, ...] = ()
    """Metrics that are not a number on one side, in words."""

    def level(self, name: str) -> Level:
        return next(level for level in self.levels if level.name == name)

    @property
    def causes(self) -> tuple[str, ...]:
        """Possible causes of a difference, most likely first."""
        against = [level for level in self.levels if level.state == "different"]
        return tuple(dict.fromkeys(cause for level in against for cause in level.causes))

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "inputs": list(self.inputs),
            "broken": list(self.broken),
            "causes": list(self.causes),
            "levels": [asdict(level) for level in self.levels],
        }


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    computation: Computation
    comparison: Comparison = field(repr=False)
    question: Question = "outcome"
    """The one that decides."""

    def __str__(self) -> str:
        return self.words

    @property
    def words(self) -> str:
        """Decision, answers and what to run next: for somebody who decides, and does not read loss curves."""
        answers = [outcome_words(self), computation_words(self)]
        return listed([decision_words(self), *inputs_first(self, answers), *next_words(self)], "\n")

    @property
    def answer(self) -> Answer | Same:
        """To the question that decides."""
        return self.outcome.verdict if self.question == "outcome" else self.computation.verdict

    @property
    def exit_code(self) -> int:
        """0 positive, 1 different, 3 inconclusive."""
        return EXIT_CODES[self.answer]

    def deciding(self, question: Question) -> Verdict:
        """The same answers, of which that to `question` decides."""
        return replace(self, question=question)

    def level(self, name: str) -> Level:
        return self.computation.level(name)

    def as_json(self) -> dict[str, Any]:
        return {
            "words": self.words,
            "question": self.question,
            "outcome": self.outcome.as_json(),
            "computation": self.computation.as_json(),
            "comparison": self.comparison.as_json(),
        }


def judge(comparison: Comparison, outcome: Outcome, levels_run: Iterable[Level]) -> Verdict:
    """The levels that were not run are shown as not run."""
    by_name = {level.name: level for level in levels_run}
    levels = tuple(by_name.get(name) or not_run(name) for name in LEVELS)
    inputs = tuple(difference.message for difference in comparison.differences)
    broken = tuple(value.words for value in comparison.not_numbers if value.one_sided)
    flat = tuple(listed((effect.metric, effect.reason), ": ") for effect in outcome.effects if effect.reason)
    verdict = "different" if inputs or broken or flat else _computation(levels)
    if verdict == "same" and comparison.not_numbers:
        verdict = "inconclusive"
    # Dumps of single steps have no curves, and rewards of replayed responses are equal by themselves.
    told_by_curves = comparison.has_curves and not comparison.replays
    question: Question = "outcome" if told_by_curves else "computation"
    return Verdict(outcome, Computation(verdict, levels, inputs, (*broken, *flat)), comparison, question)


def _computation(levels: tuple[Level, ...]) -> Same:
    """Nothing cancels a difference that one level found."""
    states = {level.name: level.state for level in levels}
    if "different" in states.values():
        return "different"
    # Curves alone may leave it open, which the envelope then decides.
    undecided = [name for name, state in states.items() if state == "cannot tell" and name != "P2"]
    seen = any(states[name] == "same" for name in _WHOLE_RUNS) or is_right(levels)
    return "same" if seen and not undecided else "inconclusive"


def is_right(levels: tuple[Level, ...]) -> bool:
    """Operators and a step in float32 that were held against float64: what both runs do is right."""
    operators, steps = (next(level for level in levels if level.name == name) for name in ("P0", "P1"))
    return operators.state == steps.state == "same" and steps.truth == "float32"


def decision_words(verdict: Verdict) -> str:
    """Both answers in a sentence, which begins with what the exit code says."""
    computation = "inputs" if verdict.computation.inputs else verdict.computation.verdict
    reason = _REASONS[verdict.outcome.verdict, computation]
    if verdict.answer == "inconclusive":
        return tr("Undecided: {reason}.", reason=reason)
    if verdict.answer == "different":
        return tr("Reject: {reason}.", reason=reason)
    return tr("Accept: {reason}.", reason=reason)


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
    if verdict.comparison.replays:
        objections.append(tr("Responses were replayed: rewards are equal whatever the candidate computes."))
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
    yield from (capital(one.words) for one in objections if one.name in ("recipe", "data", "metrics"))
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
    if verdict.comparison.against_baseline:
        return tr("A baseline has nothing but curves.")
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
    elif outcome.verdict == "inconclusive" and verdict.comparison.against_baseline:
        yield from _next_of_a_baseline(effect)
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
    if verdict.comparison.against_baseline:
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


def _next_of_a_baseline(effect: Effect | None) -> Iterator[str]:
    if effect is not None and effect.runs_to_decide:
        yield tr(
            "To know more: a baseline of about {runs} reruns would decide ({metric}).",
            runs=effect.runs_to_decide,
            metric=effect.metric,
        )
    elif effect is not None:
        yield tr("To know more: run the candidate again. One such run may be chance, several are not.")


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
    if verdict.comparison.against_baseline:
        last = int(one.steps_S[-1])
        return tr("Compared over {count:,} points up to step {last:,}.", count=count, last=last)
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
