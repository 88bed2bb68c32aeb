"""`isotrain doctor`: what is installed, what is incompatible, what to install; and the self-test."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from isotrain import api
from isotrain.cli.arguments import AsJson
from isotrain.errors import DataError
from isotrain.language import said, tr
from isotrain.terminal import rich_console
from isotrain.tools.doctor.examine import Report, describe, has_vllm
from isotrain.tools.doctor.matrix import TARGETS, Status
from isotrain.tools.doctor.plugin import hide_a_plugin_that_cannot_load
from isotrain.tools.doctor.rules import MachineFinding
from isotrain.tools.doctor.self_test import folder as folders
from isotrain.tools.doctor.self_test.folder import CONTENTS, MACHINE, Results, clean_machine
from isotrain.tools.doctor.self_test.run import SelfTest
from isotrain.tools.doctor.self_test.stages import BUDGET_MINUTES, STAGES
from isotrain.tools.doctor.self_test.verdicts import Engine, Outcome, SelfTestSetting, StageVerdict
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
    as_json: AsJson = False,
    notes: Annotated[bool, Option("--notes", help="Also print notes.")] = False,
    save: Annotated[
        Path | None, Option(metavar="DIR", help="Save the examined files and outputs, for a bug report.")
    ] = None,
    trial: Annotated[
        Path | None,
        Option("--self-test", metavar="DIR", help="Also try devices and engines, within --budget."),
    ] = None,
    budget: Annotated[
        int,
        Option(min=3, metavar="MINUTES", help="Of --self-test; what does not fit is called unfinished."),
    ] = BUDGET_MINUTES,
    cluster: Annotated[
        str | None,
        Option(metavar="HOST:PORT", help="With --self-test: a Ray cluster of two machines to try as well."),
    ] = None,
) -> None:
    """Report incompatible driver, toolkit and package versions on this machine, and what to install.

    Only a child process imports torch, so this works even if `import torch` fails. Exit code 0: no problem
    prevents training; 1: at least one does; 2: a mistake in the command; 3: none was found, but the self-test
    did not end within its budget.

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
    system: System = RecordedMachine(_machine_of(folder)) if folder else ThisMachine()
    kept = save or (trial and _new_folder(trial))
    report = api.doctor(target, recipe, system=Recording(system, kept) if kept else system)
    results = folders.read(folder) if folder and folders.is_self_test(folder) else None
    if not as_json:
        _print(report, notes)
        if save:
            typer.echo(said(tr("saved in {folder}; check it before you send it", folder=save)))
        if folder and results:
            _show_self_test(folder, results)
    if trial:
        clean_machine(trial)
        if report.errors:
            typer.echo(said(tr("the self-test did not run: fix the problems above first")), err=True)
        else:
            results = _run_self_test(report, trial, cluster, budget, quiet=as_json)
    if as_json:
        content = report.as_json() | ({"self_test": results.as_json()} if results else {})
        typer.echo(json.dumps(content, indent=2))
    failed = bool(report.errors) or (results is not None and results.any("failed"))
    unfinished = results is not None and results.any("unfinished")
    raise typer.Exit(1 if failed else 3 if unfinished else 0)


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
    from rich.table import Table
    from rich.text import Text

    console = rich_console(highlight=False, markup=False)
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


_OUTCOME_COLOURS: dict[Outcome, str] = {
    "passed": "green",
    "failed": "red",
    "skipped": "yellow",
    "unfinished": "magenta",
}
_SHOWN_LINES = 15


def _new_folder(folder: Path) -> Path:
    """Where the machine is described in the folder of a self-test, which must be new.

    One that the doctor described before a problem ended it counts as new.
    """
    if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - {MACHINE}):
        raise DataError(f"{folder} is not an empty directory; give --self-test a new one")
    (folder / MACHINE).mkdir(parents=True, exist_ok=True)
    return folder / MACHINE


def _machine_of(folder: Path) -> Path:
    """The recorded machine in a folder that `--save` or `--self-test` wrote; it may come from anybody."""
    machine = folder / MACHINE
    if not machine.is_dir():
        return folder
    if not machine.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{folder}: {MACHINE} is a link out of the folder")
    return machine


def _run_self_test(report: Report, folder: Path, cluster: str | None, budget: int, quiet: bool) -> Results:
    """Run all stages and print each as it ends; with `quiet`, to the error stream."""

    def tell(text: str, newline: bool = True) -> None:
        typer.echo(text, nl=newline, err=quiet)

    engine: Engine = "vllm" if has_vllm(report) else "hf"
    tell(f"\nself-test on {report.target} with the engine {engine}, at most {budget} minutes")
    tell(f"It writes to {folder} what you can attach to an issue, and nothing else:")
    for line in CONTENTS:
        tell(f"  {line}")
    tell("Home, host, user, network addresses and what looks like a secret are replaced where they are")
    tell("recognised. Read it before you send it.\n")
    verdicts: list[StageVerdict] = []
    started = time.monotonic()
    hide_a_plugin_that_cannot_load()
    for ends in (signal.SIGTERM, signal.SIGHUP):  # processes on devices must not outlive this one
        signal.signal(ends, lambda number, _: sys.exit(128 + number))
    # Other machines must see the files as well; on one machine they are quicker in a temporary place.
    place = folder.absolute().parent if cluster else None
    with tempfile.TemporaryDirectory(
        prefix="isotrain-self-test-", dir=place, ignore_cleanup_errors=True
    ) as work:
        setting = SelfTestSetting(device=report.target, engine=engine, work=work, cluster=cluster)
        begun = ""

        def begins(stage: str) -> None:
            nonlocal begun
            tell(_head(stage), newline=False)
            begun = stage

        try:
            for verdict in SelfTest(setting, begins, total_seconds=60.0 * budget).run():
                verdicts.append(verdict)
                _print_line(verdict, headed=begun == verdict.stage, quiet=quiet)
        finally:  # also of what was interrupted
            ended = {verdict.stage for verdict in verdicts}
            for stage in [name for name in STAGES if name not in ended]:
                interrupted = "the self-test was interrupted"
                verdicts.append(StageVerdict(stage=stage, outcome="unfinished", result=interrupted))
            results = folders.write(
                folder,
                Path(work),
                verdicts,
                device=report.target,
                engine=engine,
                simulated=report.facts.simulated,
                hosts=[cluster.rpartition(":")[0]] if cluster else [],
            )
    tell(f"\n{_counts(results)}, {time.monotonic() - started:.0f} s")
    tell(f"saved in {folder}; read it anywhere with: isotrain doctor {folder}")
    return results


def _show_self_test(folder: Path, results: Results) -> None:
    """A folder's verdicts, and the end of the output of what failed."""
    simulated = ", simulated" if results.simulated else ""
    what = f"{results.device}{simulated} with the engine {results.engine}, isotrain {results.isotrain}"
    typer.echo(f"\nself-test of {results.date} on {what}")
    for verdict in results.verdicts:
        if verdict.stage in STAGES:
            _print_line(verdict, headed=False)
    typer.echo(f"\n{_counts(results)}, {results.seconds:.0f} s")
    for verdict in results.verdicts:
        if verdict.stage in STAGES and folders.keeps_log(verdict):
            lines = folders.read_log(folder, verdict.stage)
            typer.echo(f"\n{verdict.stage} should show: {STAGES[verdict.stage]}. The end of its output:")
            typer.echo(indent("\n".join(lines[-_SHOWN_LINES:]), "  "))


def _head(stage: str) -> str:
    return f"{list(STAGES).index(stage) + 1:2}/{len(STAGES)} {stage:<19}"


def _print_line(verdict: StageVerdict, headed: bool, quiet: bool = False) -> None:
    from rich.text import Text

    ran = verdict.outcome != "skipped" and verdict.seconds
    seconds = f", {verdict.seconds:.0f} s" if ran else ""
    line = Text("" if headed else _head(verdict.stage))
    line.append(f"{verdict.outcome:<10}", _OUTCOME_COLOURS[verdict.outcome])
    line.append(f" {' '.join(verdict.result.split())}{seconds}")
    rich_console(stderr=quiet).print(line, soft_wrap=True)


def _counts(results: Results) -> str:
    outcomes = [verdict.outcome for verdict in results.verdicts]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in _OUTCOME_COLOURS)
