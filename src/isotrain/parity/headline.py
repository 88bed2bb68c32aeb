"""The verdict in plain words: for somebody who decides, and does not read loss curves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from isotrain.parity.effects import ALONE, Effect, WindowEffect
from isotrain.parity.noise import WINDOWS

if TYPE_CHECKING:
    from isotrain.parity.verdict import Verdict

_MOST_CAUSES = 3
# Between curves that are equal in every digit, an interval is as narrow as numbers can be told apart.
_NOTHING = 1e-100


def headline(verdict: Verdict) -> str:
    """Outcome, computation, and what to run to know more; a paragraph each."""
    return "\n".join([outcome_words(verdict), computation_words(verdict), *next_words(verdict)])


def outcome_words(verdict: Verdict) -> str:
    outcome = verdict.outcome
    if outcome.broken:
        return f"Outcome: different. {_sentence('; '.join(outcome.broken))}"
    if not verdict.comparison.has_curves:
        return (
            "Outcome: inconclusive. Dumps of single steps have no curves of loss or reward; compare the logs "
            "of both runs, with --dump A B for the dumps."
        )
    if not outcome.effects:
        return f"Outcome: inconclusive. {_sentence(verdict.comparison.not_numbers[0].words)}"
    first = outcome.effects[0]
    steps = _steps(verdict, first.metric)
    if outcome.verdict == "different":
        if first.reason:
            return f"Outcome: different. {_sentence(f'{first.metric}: {first.reason}')} {steps}"
        more = f"more than the margin of {first.margin:g}"
        return f"Outcome: different. {_difference(first, first.worst)}, {more}. {steps}"
    if outcome.verdict == "equivalent":
        others = len(outcome.effects) - 1
        more = f" So do {others} more metrics." if others and _all_equivalent(verdict) else ""
        return (
            f"Outcome: equivalent. {_difference(first, first.windows[0])}, within the margin of "
            f"{first.margin:g}.{more} {steps}"
        )
    unclear = next((one for one in outcome.effects if one.verdict == "inconclusive"), first)
    return (
        f"Outcome: inconclusive. {_difference(unclear, _widest(unclear))}; the margin is {unclear.margin:g}. "
        f"{_steps(verdict, unclear.metric)}"
    )


def computation_words(verdict: Verdict) -> str:
    found = verdict.computation
    if found.inputs or found.broken:
        return f"Computation: different. {_sentence('; '.join([*found.inputs, *found.broken]))}"
    ran = [level for level in found.levels if level.state != "not run"]
    if found.verdict == "different":
        against = [level for level in ran if level.state == "different"]
        likely = f" Likely causes: {'; '.join(found.causes[:_MOST_CAUSES])}." if found.causes else ""
        return f"Computation: different. {_sentence('; '.join(level.words for level in against))}{likely}"
    if found.verdict == "same":
        agree = "; ".join(level.words for level in ran if level.state == "same")
        return f"Computation: the same. {_sentence(agree)}"
    if verdict.outcome.pairing == "free-running":
        return (
            "Computation: inconclusive. Each run sampled its own responses, so the curves cannot tell "
            "rounding from a mistake."
        )
    open_words = "; ".join(level.words for level in ran if level.state == "cannot tell")
    if open_words or not ran:
        return f"Computation: inconclusive. {_sentence(open_words or 'there is no evidence')}"
    agree = "; ".join(level.words for level in ran)
    return f"Computation: inconclusive. {_sentence(agree)} No level has followed whole runs."


def next_words(verdict: Verdict) -> Iterator[str]:
    """What to run, where an answer is missing."""
    outcome, pairing = verdict.outcome, verdict.outcome.pairing
    effect = next((one for one in outcome.effects if one.verdict == "inconclusive"), None)
    alone = bool(outcome.effects) and outcome.effects[0].evidence == ALONE
    if pairing == "free-running" and alone:
        yield (
            "The run-to-run spread is unknown from one run a side: another seed alone may move a run by more "
            "than the interval says. Two or more reruns of the reference (--rerun RUN) measure it."
        )
    elif outcome.verdict == "inconclusive" and effect is not None and effect.runs_to_decide:
        yield f"To know more: about {effect.runs_to_decide} runs of each side would decide ({effect.metric})."
    elif outcome.verdict == "inconclusive" and effect is not None:
        yield "To know more: longer runs, or further seeds of both sides (--pair A B, repeated)."
    if verdict.computation.verdict != "inconclusive" or not verdict.comparison.has_curves:
        return
    if pairing == "free-running":
        yield "To know more about the computation: train on the same responses (`parity record`, `replay`)."
    elif verdict.level("P3").state == "not run":
        yield (
            "To know more about the computation: three or more runs of the reference with another kernel, "
            "micro-batch or number of ranks (--rerun RUN), or layer traces of both (observe.layer_trace=3)."
        )
    else:
        yield "To know more about the computation: layer traces of both runs (observe.layer_trace=3)."


def _difference(effect: Effect, one: WindowEffect) -> str:
    """`critic/rewards/mean is 0.107 lower (95 % interval 0.101 to 0.116 lower)`."""
    when = "on average" if one.window == WINDOWS[0] else f"in the {one.window}"
    if (
        one.interval is not None
        and max(abs(one.difference), abs(one.interval.low), abs(one.interval.high)) < _NOTHING
    ):
        return f"{effect.metric} is equal {when}"
    side = "higher" if one.difference > 0 else "lower"
    words = f"{effect.metric} is {_figure(abs(one.difference))} {side} {when}"
    if one.interval is None:
        return f"{words} (too few steps for an interval)"
    low, high = (_figure(bound, sign=True) for bound in (one.interval.low, one.interval.high))
    return f"{words} (95 % interval {low} to {high})"


def _figure(value: float, *, sign: bool = False) -> str:
    """Two digits of what matters, without exponents where people would stumble over them."""
    if not math.isfinite(value):
        return "infinite"
    text = f"{value:.3g}" if abs(value) >= 1e-4 or not value else f"{value:.1e}"
    return f"+{text}" if sign and value > 0 else text


def _widest(effect: Effect) -> WindowEffect:
    """The window that keeps it from being equivalent."""

    def reach(one: WindowEffect) -> float:
        return math.inf if one.interval is None else max(abs(one.interval.low), abs(one.interval.high))

    return max((one for one in effect.windows if one.window in (WINDOWS[0], WINDOWS[-1])), key=reach)


def _steps(verdict: Verdict, metric: str) -> str:
    one = verdict.comparison.aligned.get(metric)
    if one is None:
        return ""
    count = len(one.steps_S)
    if one.whole:
        return f"Compared over all {count:,} steps."
    each = f"the reference has {one.of_reference:,}, the candidate {one.of_candidate:,}"
    return f"Compared over {count:,} steps: {each}."


def _all_equivalent(verdict: Verdict) -> bool:
    return all(one.verdict == "equivalent" for one in verdict.outcome.effects)


def _sentence(words: str) -> str:
    """Not in capitals: many begin with the name of a metric."""
    return words + ("" if words.endswith((".", "!", "?")) else ".")
