"""`isotrain parity`: are two runs the same training?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

# numpy comes in only where runs are compared: every command reads this file.
if TYPE_CHECKING:
    from rich.table import Table

    from isotrain.parity.compare import Comparison
    from isotrain.parity.statistics import Apart

app = typer.Typer(no_args_is_help=True, help="Compare runs on two devices, or of two programs.")

_SHOWN_CHANGES = 12


@app.callback()
def _only_verbs() -> None:
    pass


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run: see below for what can be read.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The other run.")],
    reference: Annotated[
        Path | None, typer.Option("--reference", help="Which of the two is the reference; by default A.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", help="A metric to compare; may be repeated. By default losses and rewards."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow", metavar="NAME", help="A difference to accept, by the name that it is told with."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    """How far the curves of two runs are apart, by every published rule and by stricter ones.

    A and B are isotrain's run directories, logs of verl or OpenRLHF, TensorBoard files or directories, CSV or
    JSONL files. Runs of other lengths, data or recipes are refused unless that is allowed by name.

    Exit code 0: all published rules hold; 1: one does not; 2: the runs cannot be compared.

    Examples:

        isotrain parity compare runs/here runs/there

        isotrain parity compare here.log there.log --metric critic/rewards/mean --allow steps
    """
    from isotrain.errors import DataError
    from isotrain.parity.compare import compare as compare_runs
    from isotrain.parity.sources.read import read_run

    if reference is not None and reference not in (first, second):
        raise DataError(f"--reference {reference}: is neither {first} nor {second}")
    one, other = (second, first) if reference == second else (first, second)
    found = compare_runs(read_run(one), read_run(other), metric or [], allow or [])
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    else:
        _print(found)
    if not found.comparable:
        raise typer.Exit(2)
    raise typer.Exit(0 if all(outcome.passed for outcome in found.outcomes) else 1)


def _print(found: Comparison) -> None:
    from rich.console import Console

    from isotrain.parity.obstacles import ALLOWED, environment_changes

    console = Console(highlight=False, markup=False)
    for name, run in (("reference", found.reference), ("candidate", found.candidate)):
        console.print(f"{name}  {run.path} ({run.format})", soft_wrap=True)
    for obstacle in found.allowed:
        console.print(f"allowed: {obstacle.message}", style="yellow", soft_wrap=True)
    for obstacle in found.obstacles:
        hint = f" (--allow {obstacle.name} compares all the same)" if obstacle.name in ALLOWED else ""
        console.print(f"not comparable: {obstacle.message}{hint}", style="red", soft_wrap=True)
    changes = environment_changes(found.reference, found.candidate)
    if changes:
        console.print("\nwhat differs around them")
        for line in changes[:_SHOWN_CHANGES]:
            console.print(f"  {line}", style="dim", soft_wrap=True)
        if len(changes) > _SHOWN_CHANGES:
            console.print(f"  and {len(changes) - _SHOWN_CHANGES} more: --json has them all", style="dim")
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
        console.print("  none is about these metrics")
    for what, speed in found.speed.items():
        console.print(f"throughput, {what}: {speed.ratio:.3f} of the reference (inverse {speed.inverse:.3f})")
    console.print(
        "\nThe published rules are wide: training on other data may keep them. Honest pairs change together "
        "from step to step (0.99 and more), and are a small share of a flat line's error apart.",
        style="dim",
    )


def _curves(curves: dict[str, Apart]) -> Table:
    from rich.table import Table

    names = list(curves)
    table = Table("", *names, box=None, header_style="bold", pad_edge=False)
    for label, show in _ROWS:
        table.add_row(label, *(show(curves[name]) for name in names))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


_ROWS: tuple[tuple[str, Callable[[Apart], str]], ...] = (
    ("steps compared", lambda a: f"{a.steps:,}"),
    ("mean absolute error, in hundredths", lambda a: _number(100 * a.mean_absolute)),
    ("mean relative error, in %", lambda a: _number(a.mean_relative and 100 * a.mean_relative)),
    ("first step", lambda a: _number(a.first)),
    ("largest (at step)", lambda a: f"{_number(a.largest)} ({a.largest_at})"),
    ("signed mean", lambda a: _number(a.signed_mean)),
    (
        "  its 95 % interval",
        lambda a: f"{_number(a.signed_interval.low)} to {_number(a.signed_interval.high)}",
    ),
    ("the curves part at step", lambda a: "-" if a.parts_at is None else str(a.parts_at)),
    (
        "correlation of changes",
        lambda a: "-" if a.change_correlation is None else f"{a.change_correlation:.4f}",
    ),
    ("share of a flat line's error", lambda a: _number(a.share_of_flat)),
)
