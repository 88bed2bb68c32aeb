"""`isotrain parity compare`: do two runs end up alike, by the same computation?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from isotrain.cli.arguments import AsJson, paths_of
from isotrain.errors import DataError
from isotrain.language import Language, padded, said, tr
from isotrain.terminal import rich_console

# numpy comes in only where runs are compared: every command reads this file.
if TYPE_CHECKING:
    from rich.console import Console

    from isotrain.tools.parity.compare.comparison import Comparison
    from isotrain.tools.parity.compare.effects import Effect
    from isotrain.tools.parity.compare.statistics import Apart
    from isotrain.tools.parity.report.acceptance import Acceptance
    from isotrain.tools.parity.verdict import Verdict

_SHOWN_CHANGES = 12
# Of the columns of a window, so that the tables of several metrics stand below each other.
_WIDTHS = (14, 9, 9, 10, 20)
_TABLES = {Language.en: "acceptance.md", Language.zh: "acceptance.zh.md"}
_STYLES = {
    "equivalent": "bold green",
    "same": "bold green",
    "different": "bold red",
    "inconclusive": "bold yellow",
}


class Require(str, Enum):
    """The question whose answer is the exit code."""

    outcome = "outcome"
    computation = "computation"


First = Annotated[Path, Argument(metavar="A", help="A run, in one of the formats below.")]
Second = Annotated[Path, Argument(metavar="B", help="The other run.")]
Reference = Annotated[Path | None, Option(help="Which of the two is the reference; by default A.")]
Metrics = Annotated[
    list[str] | None,
    Option(
        help="A metric to compare; may be repeated. By default losses and rewards. loss=train/loss: the "
        "reference calls it loss, the candidate train/loss."
    ),
]
Margins = Annotated[
    list[str] | None,
    Option(
        metavar="METRIC=VALUE",
        help="The largest difference that does not matter, in the metric's own unit. By default 0.02 for "
        "losses, 0.04 for rewards.",
    ),
]
Allow = Annotated[
    list[str] | None,
    Option(
        metavar="NAME",
        help="An intended difference: recipe, data, steps (one run is shorter), validation, metrics (one is "
        "missing), length, kl, entropy, grad_norm, clip or throughput.",
    ),
]
Reruns = Annotated[
    list[Path] | None,
    Option(metavar="RUN", help="A further run of the reference; may be repeated. Give at least three."),
]
Pairs = Annotated[
    list[str] | None,
    Option(metavar="A B", help="Further runs of reference and candidate with another seed; may be repeated."),
]
Dumps = Annotated[
    str | None,
    Option(metavar="A B", help="Dumps of msprobe of both runs, the reference's first: layers and APIs."),
]
Free = Annotated[
    bool, Option("--free", help="Each run sampled its own responses: do not compare step by step.")
]
Items = Annotated[
    int | None,
    Option(min=1, metavar="N", help="Rows of the validation data: validation scores then have an interval."),
]
Required = Annotated[
    Require | None,
    Option(help="Which answer the exit code gives: by default outcome, for two dumps computation."),
]
Rule = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Apply an acceptance rule of verl's community and print its table in English and Chinese; the "
        "exit code is then the rule's. An unknown name lists them.",
    ),
]
Devices = Annotated[
    str | None,
    Option(metavar="A,B", help="For --rule: the devices of both runs, if their logs do not say."),
]
Report = Annotated[
    Path | None, Option(metavar="DIR", help="Directory for verdict.json, report.html and plots.")
]


def _pair(text: str, option: str = "--pair") -> tuple[Path, Path]:
    paths = paths_of(text)
    if len(paths) != 2:
        raise DataError(f"{option} {text}: give two paths, the reference's first")
    return paths[0], paths[1]


def compare(
    first: First,
    second: Second,
    reference: Reference = None,
    metric: Metrics = None,
    margin: Margins = None,
    allow: Allow = None,
    rerun: Reruns = None,
    pair: Pairs = None,
    dump: Dumps = None,
    free: Free = False,
    items: Items = None,
    require: Required = None,
    rule: Rule = None,
    devices: Devices = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Compare two runs: do they end up alike, and is it the same computation?

    A and B are isotrain run directories, logs of verl or OpenRLHF, TensorBoard files or directories, CSV or
    JSONL files, or two dumps of msprobe. A may be a file of `isotrain parity baseline`. Outcome: equivalent,
    different or inconclusive within a margin. Computation: same, different or inconclusive; logs alone can
    rarely show that it is the same. If both runs
    have observe.layer_trace=3, or with dumps of msprobe, the output names the first layer that differs.

    Exit code 0: equivalent (the same); 1: different; 3: inconclusive; 2: a run or an option
    that cannot be read.

    Examples:

        isotrain parity compare runs/here runs/there --report work/parity

        isotrain parity compare here.log there.log --dump here-profile there-profile

        isotrain parity compare here.log there.log --margin reward=0.02 --rerun here-2.log --rerun here-3.log
    """
    if reference is not None and reference not in (first, second):
        raise DataError(f"--reference {reference}: write {first} or {second}")
    if reference == second:
        first, second = second, first
    from isotrain.tools.parity.protocol import Companions, verdict_on

    verdict = verdict_on(
        first,
        second,
        Companions(
            rerun or (),
            tuple(_pair(text) for text in pair or ()),
            None if dump is None else _pair(dump, "--dump"),
        ),
        metrics=metric or [],
        margins=margin or [],
        allow=allow or [],
        free_running=free,
        items=items,
    )
    accepted = _accept(verdict, rule, devices) if rule is not None else None
    if require is not None:
        verdict = verdict.deciding(require.value)
    tell(verdict, report, as_json)
    if accepted is not None:
        raise typer.Exit(_tell_accepted(accepted, report, as_json))
    raise typer.Exit(verdict.exit_code)


def baseline(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Reruns of one recipe with other seeds.")],
    out: Annotated[Path, Option(metavar="FILE", help="The file to write, such as baseline.json.")],
    margin: Margins = None,
    nights: Annotated[int, Option(min=1, help="Comparisons that one file is used for.")] = 365,
    false_alarms: Annotated[
        float, Option(help="How many of them may say `different` though nothing changed, on average.")
    ] = 1.0,
) -> None:
    """Write a small reference file from several reruns, for nightly jobs.

    RUN is what `compare` reads. `isotrain parity compare FILE RUN` then judges a run against it, without the
    reruns. The spread between the reruns decides what is equivalent and what is different; the output says
    how large a difference each metric can show. Ten reruns or more are advised, three are the fewest.

    Exit code 0; 3: written, but some metric can never be equivalent with so few reruns; 2: an error.

    Example:

        isotrain parity baseline runs/seed-*/ --out baseline.json
    """
    from isotrain.tools.parity.baseline import make_baseline

    size, reaches = make_baseline(runs, out, margin or [], nights, false_alarms)
    console = rich_console(highlight=False, markup=False)
    words = tr("wrote {path}: {count} reruns, {size:.0f} kB", path=out, count=len(runs), size=size / 1000)
    console.print(said(words), soft_wrap=True)
    for one in reaches:
        console.print(said(one.words), style=None if one.is_enough else "yellow", soft_wrap=True)
    raise typer.Exit(0 if all(one.is_enough for one in reaches) else 3)


def _accept(verdict: Verdict, rule: str, devices: str | None) -> Acceptance:
    from isotrain.tools.parity.report.acceptance import accept

    reference, comma, candidate = (devices or "").partition(",")
    if devices is not None and not comma:
        raise DataError(
            f"--devices {devices}: write those of both runs, the reference first, such as A100,A2"
        )
    stated = (reference.strip() or None, candidate.strip() or None)
    return accept(rule, verdict.comparison.reference, verdict.comparison.candidate, stated)


def _tell_accepted(accepted: Acceptance, report: Path | None, as_json: bool) -> int:
    """The table for a pull request; 0: every line holds, 1: one is broken, 3: the logs do not say."""
    from isotrain.tools.parity.report.acceptance import markdown

    for language, name in _TABLES.items():
        table = markdown(accepted, language)
        typer.echo(f"\n{table}", err=as_json)
        if report is not None:
            (report / name).write_text(table, encoding="utf-8")
    return {True: 0, False: 1, None: 3}[accepted.accepted]


def tell(verdict: Verdict, report: Path | None, as_json: bool = False) -> None:
    """A verdict on the screen, and in a directory if one is given."""
    if as_json:
        from isotrain.tools.parity.report.text import plain

        # Statistics of hostile numbers may overflow, and JSON has no word for that.
        typer.echo(json.dumps(plain(verdict.as_json()), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show(verdict)
    if report is not None:
        from isotrain.tools.parity.compare.power import load_power
        from isotrain.tools.parity.report.write import write_report

        # The published power is of other rules than those that judge against a baseline.
        power = None if verdict.comparison.against_baseline else load_power()
        write_report(verdict, report, power=power)
        typer.echo(said(tr("wrote {path}", path=report / "report.html")), err=as_json)


def show(verdict: Verdict) -> None:
    """The decision and the two answers in words first, then what they rest on."""
    from isotrain.tools.parity.levels.level import STATES
    from isotrain.tools.parity.verdict import (
        computation_words,
        decision_words,
        inputs_first,
        next_words,
        outcome_words,
    )

    console = rich_console(highlight=False, markup=False)
    answers = (
        (verdict.outcome.verdict, outcome_words(verdict)),
        (verdict.computation.verdict, computation_words(verdict)),
    )
    decision = (verdict.answer, decision_words(verdict))
    for answer, words in (decision, *inputs_first(verdict, answers)):
        console.print(said(words), style=_STYLES[answer], soft_wrap=True)
    for words in next_words(verdict):
        console.print(said(words), soft_wrap=True)
    console.print()
    _print_comparison(verdict.comparison, console)
    if verdict.outcome.effects:
        console.print(f"\n{said(tr('outcome'))}", style="bold")
        _print_effects(verdict.outcome.effects, console)
    console.print(f"\n{said(tr('computation'))}", style="bold")
    for level in verdict.computation.levels:
        style = {"same": "green", "different": "red", "cannot tell": "yellow"}.get(level.state, "dim")
        state = padded(said(STATES[level.state]), 12)
        console.print(f"  {level.name}  {state} {said(level.words)}", style=style, soft_wrap=True)


def _print_effects(effects: Sequence[Effect], console: Console) -> None:
    """A line and a table for each metric: names of metrics are long, and terminals 80 columns wide."""
    from rich.table import Table

    from isotrain.tools.parity.compare.effects import ANSWERS
    from isotrain.tools.parity.report.text import WINDOW_COLUMNS, number, window_cells

    for effect in effects:
        if effect.same_as:
            console.print(said(tr("{metric}: as {other}", metric=effect.metric, other=effect.same_as)))
            continue
        words = tr(
            "{metric}: {answer}, margin {margin}",
            metric=effect.metric,
            answer=ANSWERS[effect.verdict],
            margin=number(effect.margin),
        )
        console.print(said(words), style=_STYLES[effect.verdict], soft_wrap=True)
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for column, width in zip(WINDOW_COLUMNS, _WIDTHS, strict=True):
            table.add_column(said(column), min_width=width, no_wrap=True)
        for window in effect.windows:
            table.add_row(*map(said, window_cells(window)))
        console.print(table, soft_wrap=True)


def _print_comparison(comparison: Comparison, console: Console) -> None:
    from isotrain.tools.parity.compare.comparison import environment_changes
    from isotrain.tools.parity.run import ROLES

    for name, run in (("reference", comparison.reference), ("candidate", comparison.candidate)):
        console.print(f"{said(ROLES[name])}  {run.path} ({run.format})", soft_wrap=True)
        for note in run.notes:
            console.print(f"           {said(note)}", style="yellow", soft_wrap=True)
    for item in comparison.allowed:
        console.print(said(tr("allowed: {message}", message=item.message)), style="yellow", soft_wrap=True)
    for item in comparison.differences:
        text = tr("differs: {message} (intended? --allow {name})", message=item.message, name=item.name)
        console.print(said(text), style="red", soft_wrap=True)
    if comparison.reference.configuration is None or comparison.candidate.configuration is None:
        text = tr("recipes and configurations: not known of both runs, so they were not compared")
        console.print(said(text), style="yellow", soft_wrap=True)
    changes = environment_changes(comparison.reference, comparison.candidate)
    if changes:
        console.print(f"\n{said(tr('differences in recipe and environment'))}")
        for line in changes[:_SHOWN_CHANGES]:
            console.print(f"  {line}", style="dim", soft_wrap=True)
        if len(changes) > _SHOWN_CHANGES:
            more = tr("and {count} more: --json shows all", count=len(changes) - _SHOWN_CHANGES)
            console.print(f"  {said(more)}", style="dim")
    if not comparison.curves:
        return
    console.print()
    _print_curves(comparison.curves, console)
    console.print()
    console.print(said(tr("published rules")), style="bold")
    for result in comparison.rule_results:
        mark, style = (tr("holds"), "green") if result.passed else (tr("BROKEN"), "red")
        text = tr(
            "{metric}: {rule}: {value:.3g} of at most {limit:g} {unit}",
            metric=result.metric,
            rule=result.rule,
            value=result.value,
            limit=result.limit,
            unit=result.unit,
        )
        console.print(f"  {padded(said(mark), 7)} {said(text)}", style=style, soft_wrap=True)
    if not comparison.rule_results:
        console.print(f"  {said(tr('none for these metrics'))}")
    for what, speed in comparison.speed.items():
        text = tr(
            "throughput, {what}: {ratio:.3f} x the reference (inverse {inverse:.3f})",
            what=what,
            ratio=speed.ratio,
            inverse=speed.inverse,
        )
        console.print(said(text))


def _print_curves(curves: dict[str, Apart], console: Console) -> None:
    """As many metrics beside each other as the terminal has room for."""
    from rich.cells import cell_len
    from rich.table import Table

    from isotrain.tools.parity.report.text import STATISTICS

    names, gap = list(curves), 2
    labels = max(cell_len(said(label)) for label, _ in STATISTICS)
    beside = max(1, (console.width - labels) // (max(map(len, names)) + gap))
    for first in range(0, len(names), beside):
        shown = names[first : first + beside]
        table = Table("", *shown, box=None, header_style="bold", pad_edge=False, padding=(0, gap, 0, 0))
        table.columns[0].min_width = labels
        for label, show in STATISTICS:
            table.add_row(said(label), *(said(show(curves[name])) for name in shown))
        console.print(table, soft_wrap=True)
