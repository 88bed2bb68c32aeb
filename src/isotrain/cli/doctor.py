"""`isotrain doctor`: what is installed, what is incompatible, what to install."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from isotrain import api
from isotrain.cli import self_test
from isotrain.language import said, tr
from isotrain.tools.doctor.examine import Report, describe
from isotrain.tools.doctor.matrix import TARGETS, Status
from isotrain.tools.doctor.rules import MachineFinding
from isotrain.tools.doctor.self_test.folder import clean_machine
from isotrain.tools.doctor.system import RecordedMachine, Recording, System, ThisMachine

if TYPE_CHECKING:
    from rich.table import Table

_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}
_LEVELS = {"error": tr("error"), "warning": tr("warning"), "note": tr("note")}
_STATUS: dict[Status, str] = {
    "verified": tr("verified"),
    "published": tr("published"),
    "end of life": tr("end of life"),
    "unverified": tr("unverified"),
}


def doctor(
    folder: Annotated[
        Path | None,
        Argument(metavar="FOLDER", help="Read what --save or --self-test wrote, here or elsewhere."),
    ] = None,
    target: Annotated[
        str | None, Option("--for", metavar="|".join(TARGETS), help="The device to train on.")
    ] = None,
    recipe: Annotated[str | None, Option(metavar="RECIPE", help="Also check what this recipe needs.")] = None,
    as_json: Annotated[bool, Option("--json", help="Everything as JSON, for programs.")] = False,
    notes: Annotated[bool, Option("--notes", help="Also print notes.")] = False,
    save: Annotated[
        Path | None, Option(metavar="DIR", help="Save the examined files and outputs, for a bug report.")
    ] = None,
    trial: Annotated[
        Path | None,
        Option("--self-test", metavar="DIR", help="Also try devices and engines, at most 15 minutes."),
    ] = None,
    cluster: Annotated[
        str | None,
        Option(metavar="HOST:PORT", help="With --self-test: a Ray cluster of two machines to try as well."),
    ] = None,
) -> None:
    """Report incompatible driver, toolkit and package versions on this machine, and what to install.

    Only a child process imports torch, so this works even if `import torch` fails. Exit code 0: no problem
    prevents training; 1: at least one does; 2: a mistake in the command.

    Examples:

        isotrain doctor

        isotrain doctor --recipe my.yaml

        isotrain doctor --save report     # a folder of texts, without secrets, for a bug report

        isotrain doctor --self-test trial # try devices, engine, weight updates; first on a new machine

        isotrain doctor trial             # read such a folder, on any machine
    """
    if problem := _mistake(folder, target, save, trial, cluster):
        typer.echo(said(tr("error: {message}", message=problem)), err=True)
        raise typer.Exit(2)
    system: System = RecordedMachine(self_test.machine_of(folder)) if folder else ThisMachine()
    kept = save or (trial and self_test.new_folder(trial))
    report = api.doctor(target, recipe, system=Recording(system, kept) if kept else system)
    results = self_test.read_results(folder) if folder else None
    if not as_json:
        _print(report, notes)
        if save:
            typer.echo(said(tr("saved in {folder}; check it before you send it", folder=save)))
        if folder and results:
            self_test.show(folder, results)
    if trial:
        clean_machine(trial)
        if report.errors:
            typer.echo(said(tr("the self-test did not run: fix the problems above first")), err=True)
        else:
            results = self_test.run(report, trial, cluster, quiet=as_json)
    if as_json:
        content = report.as_json() | ({"self_test": results.as_json()} if results else {})
        typer.echo(json.dumps(content, indent=2))
    passed = not report.errors and (results is None or results.passed)
    raise typer.Exit(0 if passed else 1)


def _mistake(
    folder: Path | None, target: str | None, save: Path | None, trial: Path | None, cluster: str | None
) -> str:
    """The mistake in the options; empty if there is none."""
    if target is not None and target not in TARGETS:
        return tr("--for {target}: use one of {targets}", target=target, targets=", ".join(TARGETS))
    if folder and (save or trial):
        return tr("FOLDER is read, nothing runs: remove --save and --self-test, or FOLDER")
    if save and trial:
        return tr("--self-test saves what --save would: remove --save")
    if cluster and not trial:
        return tr("--cluster is for --self-test DIR")
    return ""


def _print(report: Report, notes: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in describe(report):
        table.add_row(Text(said(name), style="bold"), Text(said(value)))
    console.print(table, "")
    shown = [finding for finding in report.findings if notes or finding.level != "note"]
    if shown:
        console.print(_findings(shown))
    if count := len(report.findings) - len(shown):
        console.print(
            said(tr("{count} more notes: isotrain doctor --notes", count=count)) + "\n", style="dim"
        )
    if report.too_old:
        newest = report.too_old[-1]
        published = tr(
            "published for CANN {cann}: {pairs} ({name}, {status})",
            cann=report.facts.cann,
            pairs=", ".join(f"{name} {version}" for name, version in newest.packages.items()),
            name=newest.name,
            status=_STATUS[newest.status],
        )
        console.print(said(published))
        console.print(f"  {said(tr('isotrain needs a newer torch'))}\n")
    if report.nearest is not None:
        stack = report.nearest.stack
        nearest = tr(
            "nearest complete stack: {name} ({status})", name=stack.name, status=_STATUS[stack.status]
        )
        console.print(said(nearest), style="bold")
        console.print(f"  {stack.source}", style="dim")
        for change in report.nearest.changes:
            console.print(f"  {said(change)}")
        for command in report.nearest.commands:
            # Unwrapped: it is there to be copied.
            console.print(f"    {said(command)}", style="cyan", soft_wrap=True)
        console.print()
    errors, target = len(report.errors), report.target
    if errors == 1:
        console.print(said(tr("1 problem prevents training on {target}", target=target)), style="red")
    elif errors:
        many = tr("{count} problems prevent training on {target}", count=errors, target=target)
        console.print(said(many), style="red")
    else:
        console.print(said(tr("no problem prevents training on {target}", target=target)), style="green")


def _findings(findings: list[MachineFinding]) -> Table:
    """The remedy under its problem: beside it, commands would be cut."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(said(finding.problem))
        text.append(f"\n-> {said(finding.remedy)}", style="bold")
        table.add_row(Text(said(_LEVELS[finding.level]), style=_COLOURS[finding.level]), text)
    return table
