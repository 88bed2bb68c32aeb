"""The evidence for a verdict, as sections of its page."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from isotrain.parity.inputs import environment_changes, recipe_changes
from isotrain.parity.levels import LEVELS, Check, Level
from isotrain.parity.power import EVIDENCE, Evidence, Power
from isotrain.parity.published import Outcome
from isotrain.parity.report import evidence
from isotrain.parity.report.markup import MOST_ROWS, Markup, bullets, details, element, joined, table
from isotrain.parity.statistics import Interval
from isotrain.parity.told import STATISTICS, number
from isotrain.parity.verdict import Verdict

_MOST_COLUMNS = 8
_RESULTS = {True: "holds", False: "broken", None: "for information"}
_NO_FIGURES = "The runs have no steps in common at which both are numbers."
# An open table of more rows than this would bury what follows.
_OPEN_ROWS = 12


def chip(words: str, state: str) -> Markup:
    return element("span", words, class_=f"chip {state.replace(' ', '-')}")


def level_block(level: Level) -> Markup:
    name, _, question = LEVELS[level.name].partition(": ")
    title = element("h3", element("b", level.name), f" {name} ", chip(level.state, level.state))
    parts = [title, element("p", question, class_="question"), element("p", _sentence(level.words))]
    if level.causes:
        parts += [element("p", "What may be behind it, most likely first:"), bullets(level.causes)]
    if level.checks:
        columns = ("check", "value", "limit", "result", "")
        parts.append(_folded("checks", columns, [_check(check) for check in level.checks]))
    if level.state != "not run":
        parts += [*_operators(level), *_layers(level), *_table(level)]
    return element("article", *parts, class_=f"level {level.state.replace(' ', '-')}")


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


def _check(check: Check) -> list[object]:
    state = {True: "same", False: "different", None: "not run"}[check.passed]
    result = chip(_RESULTS[check.passed], state)
    return [check.name, number(check.value), number(check.limit), result, check.note]


def _folded(what: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    shown = table(columns, rows)
    return shown if len(rows) <= _OPEN_ROWS else details(f"{len(rows):,} {what}", shown)


def _operators(level: Level) -> list[Markup]:
    found = evidence.operators(level)
    parts: list[Markup] = []
    if found:
        columns = ["operator", "shapes", "type", "candidate's error / reference's"]
        sides = [
            f"{side}: {figure.replace('_', ' ')}"
            for figure in evidence.OPERATOR_FIGURES
            for side in ("reference", "candidate")
        ]
        rows = [[one.operator, one.shapes, one.dtype, number(one.ratio), *_both_sides(one)] for one in found]
        parts.append(_folded("operators, the worst first", columns + sides, rows))
    for title, names in (
        ("Called by one of the runs only", evidence.one_sided_operators(level)),
        ("Without a float64 to be compared with", evidence.without_oracle(level)),
    ):
        if names:
            parts.append(element("p", f"{title}: {len(names):,}"))
            parts.append(bullets(names, _OPEN_ROWS))
    return parts


def _both_sides(one: evidence.Operator) -> list[str]:
    sides = (one.reference, one.candidate)
    return [number(values.get(figure)) for figure in evidence.OPERATOR_FIGURES for values in sides]


def _layers(level: Level) -> list[Markup]:
    found, first = evidence.layers(level), evidence.first_layer(level)
    if not found:
        return []
    worst = sorted(range(len(found)), key=lambda index: -found[index].decades)[:MOST_ROWS]
    rows = [
        [
            element("b", one.name) if one is first or one == first else one.name,
            one.kind,
            one.step,
            number(one.error),
            number(one.limit),
            chip("past", "different") if one.decades > 0 else chip("within", "same"),
        ]
        for one in (found[index] for index in sorted(worst))
    ]
    shown = table(("layer", "of", "step", "error", "limit", ""), rows)
    words = f"{len(found):,} comparisons of layers, in order of execution"
    if len(found) > len(rows):
        words += f": the {len(rows)} worst, beside their limits"
    if first is None:
        return [details(words, shown)]
    told = f"The first that differs: {first.name} ({first.kind}, step {first.step})."
    return [element("p", told, class_="first"), details(words, shown)]


def _table(level: Level) -> list[Markup]:
    found = evidence.table(level)
    if found is None:
        return []
    rows = [[_cell(cell) for cell in row] for row in found.rows]
    return [_folded("rows", found.columns, rows)]


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, float) else "-" if value is None else str(value)


def statistics(verdict: Verdict) -> Markup:
    curves = verdict.comparison.curves
    if not curves:
        return element("p", _NO_FIGURES)
    names = list(curves)[:_MOST_COLUMNS]
    rows = [[label, *(tell(curves[name]) for name in names)] for label, tell in STATISTICS]
    left = len(curves) - len(names)
    more = f"and {left:,} more metrics: verdict.json has them all"
    rest = [element("p", more, class_="rest")] if left else []
    speed = [
        f"Throughput, {what}: {ratio.ratio:.3f} of the reference's (inverse {ratio.inverse:.3f})."
        for what, ratio in verdict.comparison.speed.items()
    ]
    return joined([table(("", *names), rows), *rest, *(element("p", line) for line in speed)])


def published(verdict: Verdict) -> Markup:
    outcomes = verdict.comparison.outcomes
    if not outcomes:
        return element("p", "No published rule is about these metrics.")
    rows = [_rule(verdict, outcome) for outcome in outcomes]
    columns = ("rule", "metric", "value", "at most", "unit", "result", "a flat line would have")
    wide = (
        "These rules are wide and decide nothing here. Their 2 % are 0.02 in the metric's own unit, whatever "
        "its size. On published curves of 100 steps, honest pairs on devices of different makers are 0.00003 "
        "apart, and a run trained on other data 0.018: both pass. The last column is what a flat line at the "
        "reference's mean would have in the candidate's place."
    )
    return joined([element("p", wide), table(columns, rows)])


def _rule(verdict: Verdict, outcome: Outcome) -> list[object]:
    reference = verdict.comparison.reference.metrics[outcome.metric]
    candidate = verdict.comparison.candidate.metrics[outcome.metric]
    values_S = reference.values_S[np.isin(reference.steps_S, candidate.steps_S)]
    flat: object = "-"
    if outcome.unit == "hundredths":
        size = 100 * float(np.mean(np.abs(values_S - values_S.mean())))
        flat = f"{number(size)}: {'holds' if size <= outcome.limit else 'broken'}"
    state = "same" if outcome.passed else "different"
    result = chip(_RESULTS[outcome.passed], state)
    limit = number(outcome.limit)
    return [outcome.rule, outcome.metric, number(outcome.value), limit, outcome.unit, result, flat]


def around(verdict: Verdict) -> Markup:
    comparison = verdict.comparison
    reference, candidate = comparison.reference, comparison.candidate
    parts: list[Markup] = []
    notes = [
        f"{role}: {note}"
        for role, run in (("reference", reference), ("candidate", candidate))
        for note in run.notes
    ]
    if notes:
        parts += [element("h3", "Notes on the logs"), bullets(notes)]
    for title, found in (("Differs", comparison.differences), ("Allowed", comparison.allowed)):
        if found:
            parts += [element("h3", title), bullets([f"{one.name}: {one.message}" for one in found])]
    environments = reference.environment, candidate.environment
    known = (
        ("Recipe", recipe_changes(reference, candidate), reference.recipe, candidate.recipe),
        ("Environment", environment_changes(reference, candidate), *environments),
    )
    for title, changes, one, other in known:
        parts.append(element("h3", title))
        if one is None or other is None:
            parts.append(element("p", "Not known of both runs, so it was not compared."))
        elif not changes:
            parts.append(element("p", "Nothing that matters differs."))
        elif len(changes) <= _OPEN_ROWS:
            parts.append(bullets(changes))
        else:
            parts.append(details(f"{len(changes):,} differences", bullets(changes)))
    return joined(parts)


def power_table(power: Power | None, evidence: Evidence) -> Markup:
    """Only the row of the evidence that this verdict had."""
    found = None if power is None else power.of(evidence)
    if power is None or found is None:
        words = f"How often {EVIDENCE[evidence]} miss a bug has not been measured with this version's rules."
        return element("p", words)
    lines = [
        f"This verdict rests on {EVIDENCE[evidence]}. With that, {found.caught} of {found.mutations} bugs "
        f"that were put in on purpose are called different and {found.missed} the same"
        f"{_share(', so of such bugs it does not find', found.miss_rate)}; {found.accused} of {found.honest} "
        "honest pairs are called different"
        f"{_share(', so its false alarms are', found.false_alarm_rate)}. The rest is inconclusive.",
        f"Measured {power.date}: {power.protocol}.",
    ]
    return joined([element("p", line) for line in lines])


def _share(words: str, found: Interval | None) -> str:
    if found is None:
        return ""
    low, high = math.floor(100 * found.low), math.ceil(100 * found.high)
    return f"{words} between {low} % and {high} % (95 % interval)"


def effects(verdict: Verdict) -> Markup:
    columns = (
        "metric",
        "window",
        "reference",
        "candidate",
        "difference",
        "95 % interval",
        "margin",
        "answer",
    )
    rows: list[list[object]] = []
    for effect in verdict.outcome.effects:
        for position, one in enumerate(effect.windows):
            interval = (
                "-" if one.interval is None else f"{number(one.interval.low)} to {number(one.interval.high)}"
            )
            answer: object = chip(effect.verdict, effect.verdict) if position == 0 else ""
            figures = [number(one.reference), number(one.candidate), number(one.difference), interval]
            rows.append(
                [effect.metric if position == 0 else "", one.window, *figures, number(effect.margin), answer]
            )
    if not rows:
        return element("p", _NO_FIGURES)
    from_what = verdict.outcome.effects[0].evidence
    how = (
        f"Estimated from {from_what}, as {verdict.outcome.pairing} curves. Equivalent: the interval of the "
        "whole run and that of its last quarter lie within the margin. Different: the difference is larger "
        "than the margin, and noise would make one so large in less than 1 of 100 pairs."
    )
    return joined([element("p", how), table(columns, rows)])


def inputs(verdict: Verdict) -> Markup:
    comparison = verdict.comparison
    rows = [
        [role, name, element("code", digest)]
        for role, run in (("reference", comparison.reference), ("candidate", comparison.candidate))
        for name, digest in run.sha256.items()
    ]
    if not rows:
        return element("p", "The runs were not read from files.")
    return table(("run", "file", "SHA-256"), rows)
