"""The evidence for a verdict, as sections of its page."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from isotrain.language import capital, listed, tr
from isotrain.tools.parity.compare.comparison import environment_changes, recipe_changes
from isotrain.tools.parity.compare.effects import ANSWERS
from isotrain.tools.parity.compare.outcome import PAIRINGS
from isotrain.tools.parity.compare.power import EVIDENCE, Evidence, Power
from isotrain.tools.parity.compare.published import RuleResult
from isotrain.tools.parity.compare.statistics import Interval
from isotrain.tools.parity.levels.level import LEVELS, STATES, Check, Level
from isotrain.tools.parity.report import evidence
from isotrain.tools.parity.report.text import (
    MOST_ROWS,
    STATISTICS,
    WINDOW_COLUMNS,
    Markup,
    bullets,
    details,
    element,
    joined,
    number,
    table,
    window_cells,
)
from isotrain.tools.parity.run import ROLES
from isotrain.tools.parity.thresholds import RULES_SINCE
from isotrain.tools.parity.verdict import Verdict

_MOST_COLUMNS = 8
_RESULTS = {True: tr("holds"), False: tr("broken"), None: tr("for information")}
_NO_FIGURES = tr("The runs have no steps in common at which both are numbers.")
# An open table of more rows than this would bury what follows.
_OPEN_ROWS = 12


def chip(words: str, state: str) -> Markup:
    return element("span", words, class_=f"chip {state.replace(' ', '-')}")


def level_block(level: Level) -> Markup:
    name, question = LEVELS[level.name]
    state = chip(STATES[level.state], level.state)
    title = element("h3", element("b", level.name), " ", name, " ", state)
    parts = [title, element("p", question, class_="question"), element("p", _sentence(level.words))]
    if level.causes:
        parts += [element("p", tr("What may be behind it, most likely first:")), bullets(level.causes)]
    if level.checks:
        columns = (tr("check"), tr("value"), tr("limit"), tr("result"), "")
        count = tr("{count:,} checks", count=len(level.checks))
        parts.append(_folded(count, columns, [_check(check) for check in level.checks]))
    if level.state != "not run":
        parts += [*_operators(level), *_layers(level)]
    return element("article", *parts, class_=f"level {level.state.replace(' ', '-')}")


def _sentence(words: str) -> str:
    return capital(words) if words.endswith((".", "!", "?")) else tr("{words}.", words=capital(words))


def _check(check: Check) -> list[object]:
    state = {True: "same", False: "different", None: "not run"}[check.passed]
    result = chip(_RESULTS[check.passed], state)
    return [check.name, number(check.value), number(check.limit), result, check.note]


def _folded(what: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    shown = table(columns, rows)
    return shown if len(rows) <= _OPEN_ROWS else details(what, shown)


def _operators(level: Level) -> list[Markup]:
    operators = evidence.operators(level)
    parts: list[Markup] = []
    if operators:
        error = [listed((ROLES[side], tr("error|number")), ": ") for side in ("reference", "candidate")]
        columns = [tr("operator"), tr("shapes"), tr("type"), tr("candidate's error / reference's"), *error]
        rows = [
            [
                *(row[name] for name in ("operator", "shapes", "dtype")),
                *(number(row[name]) for name in ("ratio", "reference", "candidate")),
            ]
            for row in operators
        ]
        count = tr("{count:,} operators, the worst first", count=len(rows))
        parts.append(_folded(count, columns, rows))
    for title, names in (
        (tr("Called by one of the runs only"), evidence.one_sided_operators(level)),
        (tr("Without a float64 to be compared with"), evidence.without_oracle(level)),
    ):
        if names:
            parts.append(element("p", listed((title, f"{len(names):,}"), ": ")))
            parts.append(bullets(names, _OPEN_ROWS))
    return parts


def _layers(level: Level) -> list[Markup]:
    compared, first = evidence.layers(level), evidence.first_layer(level)
    if not compared:
        return []
    worst = sorted(range(len(compared)), key=lambda index: -compared[index].decades)[:MOST_ROWS]
    rows = [
        [
            element("b", layer.name) if layer is first or layer == first else layer.name,
            layer.kind,
            layer.step,
            number(layer.error),
            number(layer.limit),
            chip(tr("past"), "different") if layer.decades > 0 else chip(tr("within"), "same"),
        ]
        for layer in (compared[index] for index in sorted(worst))
    ]
    shown = table((tr("layer"), tr("of"), tr("step"), tr("error|number"), tr("limit"), ""), rows)
    words = tr("{count:,} comparisons of layers, in order of execution", count=len(compared))
    if len(compared) > len(rows):
        words = tr(
            "{count:,} comparisons of layers, in order of execution: the {shown} worst, beside their limits",
            count=len(compared),
            shown=len(rows),
        )
    if first is None:
        return [details(words, shown)]
    sentence = tr(
        "The first that differs: {name} ({kind}, step {step}).",
        name=first.name,
        kind=first.kind,
        step=first.step,
    )
    return [element("p", sentence, class_="first"), details(words, shown)]


def statistics(verdict: Verdict) -> Markup:
    curves = verdict.comparison.curves
    if not curves:
        return element("p", _NO_FIGURES)
    names = list(curves)[:_MOST_COLUMNS]
    rows = [[label, *(tell(curves[name]) for name in names)] for label, tell in STATISTICS]
    left = len(curves) - len(names)
    more = tr("and {count:,} more metrics: verdict.json has them all", count=left)
    rest = [element("p", more, class_="rest")] if left else []
    speed = [
        tr(
            "Throughput, {what}: {ratio:.3f} of the reference's (inverse {inverse:.3f}).",
            what=what,
            ratio=ratio.ratio,
            inverse=ratio.inverse,
        )
        for what, ratio in verdict.comparison.speed.items()
    ]
    return joined([table(("", *names), rows), *rest, *(element("p", line) for line in speed)])


def published(verdict: Verdict) -> Markup:
    results = verdict.comparison.rule_results
    if not results:
        return element("p", tr("No published rule is about these metrics."))
    rows = [_rule(verdict, result) for result in results]
    columns = (
        tr("rule"),
        tr("metric"),
        tr("value"),
        tr("at most"),
        tr("unit"),
        tr("result"),
        tr("a flat line would have"),
    )
    wide = tr(
        "These rules are wide and decide nothing here. Their 2 % are 0.02 in the metric's own unit, whatever "
        "its size. On published curves of 100 steps, honest pairs on devices of different makers are 0.00003 "
        "apart, and a run trained on other data 0.018: both pass. The last column is what a flat line at the "
        "reference's mean would have in the candidate's place."
    )
    return joined([element("p", wide), table(columns, rows)])


def _rule(verdict: Verdict, outcome: RuleResult) -> list[object]:
    reference = verdict.comparison.reference.metrics[outcome.metric]
    candidate = verdict.comparison.candidate.metrics[outcome.metric]
    values_S = reference.values_S[np.isin(reference.steps_S, candidate.steps_S)]
    flat: object = "-"
    if outcome.unit == "hundredths":
        size = 100 * float(np.mean(np.abs(values_S - values_S.mean())))
        flat = listed((number(size), _RESULTS[size <= outcome.limit]), ": ")
    state = "same" if outcome.passed else "different"
    result = chip(_RESULTS[outcome.passed], state)
    limit = number(outcome.limit)
    return [outcome.rule, outcome.metric, number(outcome.value), limit, outcome.unit, result, flat]


def around(verdict: Verdict) -> Markup:
    comparison = verdict.comparison
    reference, candidate = comparison.reference, comparison.candidate
    parts: list[Markup] = []
    notes = [
        listed((ROLES[role], note), ": ")
        for role, run in (("reference", reference), ("candidate", candidate))
        for note in run.notes
    ]
    if notes:
        parts += [element("h3", tr("Notes on the logs")), bullets(notes)]
    for title, differences in ((tr("Differs"), comparison.differences), (tr("Allowed"), comparison.allowed)):
        if differences:
            parts += [
                element("h3", title),
                bullets([listed((difference.name, difference.message), ": ") for difference in differences]),
            ]
    environments = reference.environment, candidate.environment
    known = (
        (
            tr("Recipe"),
            recipe_changes(reference, candidate),
            reference.configuration,
            candidate.configuration,
        ),
        (tr("Environment"), environment_changes(reference, candidate), *environments),
    )
    for title, changes, of_reference, of_candidate in known:
        parts.append(element("h3", title))
        if of_reference is None or of_candidate is None:
            parts.append(element("p", tr("Not known of both runs, so it was not compared.")))
        elif not changes:
            parts.append(element("p", tr("Nothing that matters differs.")))
        elif len(changes) <= _OPEN_ROWS:
            parts.append(bullets(changes))
        else:
            parts.append(details(tr("{count:,} differences", count=len(changes)), bullets(changes)))
    return joined(parts)


def power_table(power: Power | None, evidence: Evidence) -> Markup:
    """Only the row of the evidence that this verdict had."""
    counts = None if power is None else power.of(evidence)
    if power is None or counts is None:
        words = tr(
            "How often {evidence} miss a bug has not been measured with this version's rules.",
            evidence=EVIDENCE[evidence],
        )
        return element("p", words)
    bugs = tr(
        "{caught} of {mutations} bugs that were put in on purpose are called different and {missed} the same",
        caught=counts.caught,
        mutations=counts.mutations,
        missed=counts.missed,
    )
    if counts.miss_rate is not None:
        bugs = tr(
            "{bugs}, so of such bugs it does not find {share}", bugs=bugs, share=_share(counts.miss_rate)
        )
    honest = tr(
        "{accused} of {honest} honest pairs are called different",
        accused=counts.accused,
        honest=counts.honest,
    )
    if counts.false_alarm_rate is not None:
        honest = tr(
            "{honest}, so its false alarms are {share}", honest=honest, share=_share(counts.false_alarm_rate)
        )
    rests = tr(
        "This verdict rests on {evidence}. With that, {bugs}; {honest}. The rest is inconclusive.",
        evidence=EVIDENCE[evidence],
        bugs=bugs,
        honest=honest,
    )
    measured = tr("Measured {date}: {protocol}.", date=power.date, protocol=power.protocol)
    if power.date < RULES_SINCE:
        measured = tr(
            "Measured {date}, with rules that have changed since and were not measured again: {protocol}.",
            date=power.date,
            protocol=power.protocol,
        )
    return joined([element("p", line) for line in (rests, measured)])


def _share(interval: Interval) -> str:
    low, high = math.floor(100 * interval.low), math.ceil(100 * interval.high)
    return tr("between {low} % and {high} % (95 % interval)", low=low, high=high)


def effects(verdict: Verdict) -> Markup:
    columns = (tr("metric"), *WINDOW_COLUMNS, tr("margin"), tr("answer"))
    rows: list[list[object]] = []
    for effect in verdict.outcome.effects:
        if effect.same_as:
            rows.append([effect.metric, tr("as {metric}", metric=effect.same_as), *[""] * 6])
            continue
        for position, window in enumerate(effect.windows):
            answer: object = chip(ANSWERS[effect.verdict], effect.verdict) if position == 0 else ""
            name = effect.metric if position == 0 else ""
            rows.append([name, *window_cells(window), number(effect.margin), answer])
    if not rows:
        return element("p", _NO_FIGURES)
    from_what = verdict.outcome.effects[0].evidence
    how = tr(
        "Estimated from {evidence}, as {pairing} curves. Equivalent: the interval of the whole run and that "
        "of its last quarter lie within the margin. Different: an interval lies wholly beyond the margin.",
        evidence=from_what,
        pairing=PAIRINGS[verdict.outcome.pairing],
    )
    return joined([element("p", how), table(columns, rows)])


def inputs(verdict: Verdict) -> Markup:
    comparison = verdict.comparison
    rows = [
        [ROLES[role], name, element("code", digest)]
        for role, run in (("reference", comparison.reference), ("candidate", comparison.candidate))
        for name, digest in run.sha256.items()
    ]
    if not rows:
        return element("p", tr("The runs were not read from files."))
    return table((tr("run"), tr("file"), "SHA-256"), rows)
