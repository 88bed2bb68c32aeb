"""`isotrain doctor`: what is installed, what is incompatible, what to install."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from isotrain import api
from isotrain.doctor.examine import Report, visible_devices
from isotrain.doctor.findings import Finding
from isotrain.doctor.matrix import TARGETS
from isotrain.doctor.recorded import RecordedMachine, Recording
from isotrain.doctor.self_test import self_test
from isotrain.doctor.summary import describe
from isotrain.doctor.system import System, ThisMachine

if TYPE_CHECKING:
    from rich.table import Table

_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}


def doctor(
    target: Annotated[
        str | None, Option("--for", metavar="|".join(TARGETS), help="The device to train on.")
    ] = None,
    recipe: Annotated[str | None, Option(metavar="RECIPE", help="Also check what this recipe needs.")] = None,
    as_json: Annotated[bool, Option("--json", help="Everything as JSON, for programs.")] = False,
    notes: Annotated[bool, Option("--notes", help="Also print notes.")] = False,
    save: Annotated[
        Path | None, Option(metavar="DIR", help="Save the examined files and outputs, for a bug report.")
    ] = None,
    saved: Annotated[
        Path | None, Option(metavar="DIR", help="Examine a recorded machine instead of this one.")
    ] = None,
    trial: Annotated[
        Path | None,
        Option("--self-test", metavar="DIR", help="Also train a small model on the device and on the host."),
    ] = None,
) -> None:
    """Report incompatible driver, toolkit and package versions on this machine, and what to install.

    Only a child process imports torch, so this works even if `import torch` fails. Exit code 0: no problem
    prevents training; 1: at least one does; 2: a mistake in the command.

    Examples:

        isotrain doctor

        isotrain doctor --recipe my.yaml

        isotrain doctor --save report     # a folder of texts, without secrets, for a bug report

        isotrain doctor --self-test trial # compare short runs on the device and on the host
    """
    if target is not None and target not in TARGETS:
        typer.echo(f"error: --for {target}: use one of {', '.join(TARGETS)}", err=True)
        raise typer.Exit(2)
    if saved and (save or trial):
        typer.echo("error: --saved examines another machine; remove --save and --self-test", err=True)
        raise typer.Exit(2)
    system: System = RecordedMachine(saved) if saved else ThisMachine()
    report = api.doctor(target, recipe, system=Recording(system, save) if save else system)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        _print(report, notes)
        if save:
            typer.echo(f"saved in {save}; check it before you send it")
    if trial and report.errors:
        typer.echo("the self-test did not run: fix the problems above first", err=True)
    passed = not report.errors and (trial is None or _try(report, trial, as_json))
    raise typer.Exit(0 if passed else 1)


def _try(report: Report, work: Path, as_json: bool) -> bool:
    """Run the self-test and print each check as it ends; returns whether all passed."""
    found = []
    for check in self_test(report.target, work.absolute(), visible_devices(report)):
        found.append(check)
        mark = "passed" if check.passed else "FAILED"
        typer.echo(f"{mark}  {check.name}: {check.result}, {check.seconds:.0f} s", err=as_json)
    kept = {**report.as_json(), "self_test": [asdict(check) for check in found]}
    (work / "self-test.json").write_text(json.dumps(kept, indent=2))
    typer.echo(f"saved in {work}; self-test.json has the results", err=as_json)
    return all(check.passed for check in found)


def _print(report: Report, notes: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in describe(report):
        table.add_row(Text(name, style="bold"), Text(_plain(value)))
    console.print(table, "")
    shown = [finding for finding in report.findings if notes or finding.level != "note"]
    if shown:
        console.print(_findings(shown))
    if len(shown) < len(report.findings):
        count = len(report.findings) - len(shown)
        console.print(f"{count} more notes: isotrain doctor --notes\n", style="dim")
    if report.too_old:
        newest = report.too_old[-1]
        pairs = ", ".join(f"{name} {version}" for name, version in newest.packages.items())
        console.print(f"published for CANN {report.facts.cann}: {pairs} ({newest.name}, {newest.status})")
        console.print("  isotrain needs a newer torch\n")
    if report.nearest is not None:
        stack = report.nearest.stack
        console.print(f"nearest complete stack: {stack.name} ({stack.status})", style="bold")
        console.print(f"  {stack.source}", style="dim")
        for change in report.nearest.changes:
            console.print(f"  {_plain(change)}")
        for command in report.nearest.commands:
            # Unwrapped: it is there to be copied.
            console.print(f"    {command}", style="cyan", soft_wrap=True)
        console.print()
    errors = len(report.errors)
    if errors:
        problems = "1 problem prevents" if errors == 1 else f"{errors} problems prevent"
        console.print(f"{problems} training on {report.target}", style="red")
    else:
        console.print(f"no problem prevents training on {report.target}", style="green")


def _plain(text: str) -> str:
    """Without terminal control characters: a saved machine may come from anybody."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "?", text)


def _findings(findings: list[Finding]) -> Table:
    """The remedy under its problem: beside it, commands would be cut."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(_plain(finding.problem))
        text.append(f"\n-> {_plain(finding.remedy)}", style="bold")
        table.add_row(Text(finding.level, style=_COLOURS[finding.level]), text)
    return table
