"""`isotrain parity`: are two runs the same training?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from isotrain import api
from isotrain.errors import DataError

# numpy comes in only where runs are compared: every command reads this file.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from isotrain.parity.compare import Comparison
    from isotrain.parity.statistics import Apart
    from isotrain.parity.verdict import Verdict

app = typer.Typer(no_args_is_help=True, help="Compare runs on two devices, or from two frameworks.")

_SHOWN_CHANGES = 12


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run, in one of the formats below.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The other run.")],
    reference: Annotated[Path | None, Option(help="Which of the two is the reference; by default A.")] = None,
    metric: Annotated[
        list[str] | None,
        Option(help="A metric to compare; may be repeated. By default losses and rewards."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="A difference to accept, by the name in its message."),
    ] = None,
    envelope: Annotated[
        list[Path] | None,
        Option(
            metavar="RUN",
            help="Another reference run with a harmless difference; give at least three.",
        ),
    ] = None,
    report: Annotated[
        Path | None, Option(metavar="DIR", help="Directory for verdict.json, report.html and plots.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    """Check whether two runs are the same training, by every published rule and by stricter ones.

    A and B are isotrain run directories, logs of verl or OpenRLHF, TensorBoard files or directories, CSV or
    JSONL files. Runs with different lengths, data or recipes are refused unless --allow names the difference.
    If both runs have observe.layer_trace=2, the output names the first layer that differs.

    Exit code 0: the same; 1: different; 2: cannot tell.

    Examples:

        isotrain parity compare runs/here runs/there --report work/parity

        isotrain parity compare here.log there.log --metric critic/rewards/mean --allow steps
    """
    if reference is not None and reference not in (first, second):
        raise DataError(f"--reference {reference}: write {first} or {second}")
    one, other = (second, first) if reference == second else (first, second)
    verdict = api.compare(one, other, metrics=metric or [], allow=allow or [], envelope=envelope or [])
    tell(verdict, report, as_json)
    raise typer.Exit(verdict.exit_code)


def tell(verdict: Verdict, report: Path | None, as_json: bool = False) -> None:
    """A verdict on the screen, and in a directory if one is given."""
    if as_json:
        from isotrain.parity.canonical import plain

        # Statistics of hostile numbers may overflow, and JSON has no word for that.
        typer.echo(json.dumps(plain(verdict.as_json()), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show(verdict)
    if report is not None:
        from isotrain.parity.power import load_power
        from isotrain.parity.report.write import write_report

        write_report(verdict, report, power=load_power())
        typer.echo(f"wrote {report / 'report.html'}", err=as_json)


def show(verdict: Verdict) -> None:
    """The verdict in words first, then what it rests on."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    style = {"same": "bold green", "different": "bold red"}.get(verdict.outcome, "bold yellow")
    console.print(verdict.words, style=style, soft_wrap=True)
    console.print()
    _print_comparison(verdict.comparison, console)
    if not verdict.comparison.comparable:
        return
    console.print("\nlevels", style="bold")
    for level in verdict.levels:
        style = {"same": "green", "different": "red", "cannot tell": "yellow"}.get(level.state, "dim")
        console.print(f"  {level.name}  {level.state:<12} {level.words}", style=style, soft_wrap=True)


def _print_comparison(found: Comparison, console: Console) -> None:
    from isotrain.parity.obstacles import ALLOWED, environment_changes

    for name, run in (("reference", found.reference), ("candidate", found.candidate)):
        console.print(f"{name}  {run.path} ({run.format})", soft_wrap=True)
    for obstacle in found.allowed:
        console.print(f"allowed: {obstacle.message}", style="yellow", soft_wrap=True)
    for obstacle in found.obstacles:
        hint = f" (--allow {obstacle.name} compares anyway)" if obstacle.name in ALLOWED else ""
        console.print(f"not comparable: {obstacle.message}{hint}", style="red", soft_wrap=True)
    changes = environment_changes(found.reference, found.candidate)
    if changes:
        console.print("\ndifferences in recipe and environment")
        for line in changes[:_SHOWN_CHANGES]:
            console.print(f"  {line}", style="dim", soft_wrap=True)
        if len(changes) > _SHOWN_CHANGES:
            console.print(f"  and {len(changes) - _SHOWN_CHANGES} more: --json shows all", style="dim")
    if not found.comparable:
        return
    console.print()
    console.print(_curves(found.curves))
    console.print()
    console.print("published rules", style="bold")
    for outcome in found.outcomes:
        mark, style = ("holds", "green") if outcome.passed else ("BROKEN", "red")
        text = f"{outcome.value:.3g} of at most {outcome.limit:g} {outcome.unit}"
        console.print(f"  {mark:<7} {outcome.metric}: {outcome.rule}: {text}", style=style, soft_wrap=True)
    if not found.outcomes:
        console.print("  none for these metrics")
    for what, speed in found.speed.items():
        console.print(f"throughput, {what}: {speed.ratio:.3f} x the reference (inverse {speed.inverse:.3f})")


def _curves(curves: dict[str, Apart]) -> Table:
    from rich.table import Table

    from isotrain.parity.told import STATISTICS

    names = list(curves)
    table = Table("", *names, box=None, header_style="bold", pad_edge=False)
    for label, show in STATISTICS:
        table.add_row(label, *(show(curves[name]) for name in names))
    return table
