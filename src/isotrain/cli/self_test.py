"""The self-test on the terminal: `isotrain doctor --self-test DIR` and `isotrain doctor DIR`."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path
from textwrap import indent

import typer

from isotrain.errors import DataError
from isotrain.tools.doctor.examine import Report, has_vllm, hide_a_plugin_that_cannot_load
from isotrain.tools.doctor.self_test import folder as folders
from isotrain.tools.doctor.self_test.folder import CONTENTS, MACHINE, Results
from isotrain.tools.doctor.self_test.run import SelfTest
from isotrain.tools.doctor.self_test.stages import STAGES, TOTAL_SECONDS
from isotrain.tools.doctor.self_test.verdicts import Engine, Outcome, SelfTestSetting, StageVerdict

_COLOURS: dict[Outcome, str] = {"passed": "green", "failed": "red", "skipped": "yellow"}
_SHOWN_LINES = 15


def new_folder(folder: Path) -> Path:
    """Where the machine is described in the folder of a self-test, which must be new.

    One that the doctor described before a problem ended it counts as new.
    """
    if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - {MACHINE}):
        raise DataError(f"{folder} is not an empty directory; give --self-test a new one")
    (folder / MACHINE).mkdir(parents=True, exist_ok=True)
    return folder / MACHINE


def machine_of(folder: Path) -> Path:
    """The recorded machine in a folder that `--save` or `--self-test` wrote; it may come from anybody."""
    machine = folder / MACHINE
    if not machine.is_dir():
        return folder
    if not machine.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{folder}: {MACHINE} is a link out of the folder")
    return machine


def read_results(folder: Path) -> Results | None:
    return folders.read(folder) if folders.is_self_test(folder) else None


def run(report: Report, folder: Path, cluster: str | None, quiet: bool) -> Results:
    """Run all stages and print each as it ends; with `quiet`, to the error stream."""

    def tell(text: str, newline: bool = True) -> None:
        typer.echo(text, nl=newline, err=quiet)

    engine: Engine = "vllm" if has_vllm(report) else "hf"
    tell(f"\nself-test on {report.target} with the engine {engine}, at most {TOTAL_SECONDS / 60:.0f} minutes")
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
            for verdict in SelfTest(setting, begins).run():
                verdicts.append(verdict)
                _print_line(verdict, headed=begun == verdict.stage, quiet=quiet)
        finally:  # also of what was interrupted
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


def show(folder: Path, results: Results) -> None:
    """A folder's verdicts, and the end of the output of what failed."""
    simulated = ", simulated" if results.simulated else ""
    what = f"{results.device}{simulated} with the engine {results.engine}, isotrain {results.isotrain}"
    typer.echo(f"\nself-test of {results.date} on {what}")
    for verdict in results.verdicts:
        if verdict.stage in STAGES:
            _print_line(verdict, headed=False)
    typer.echo(f"\n{_counts(results)}, {results.seconds:.0f} s")
    for verdict in results.verdicts:
        if verdict.outcome == "failed" and verdict.stage in STAGES:
            lines = folders.read_log(folder, verdict.stage)
            typer.echo(f"\n{verdict.stage} should show: {STAGES[verdict.stage]}. The end of its output:")
            typer.echo(indent("\n".join(lines[-_SHOWN_LINES:]), "  "))


def _head(stage: str) -> str:
    return f"{list(STAGES).index(stage) + 1:2}/{len(STAGES)} {stage:<19}"


def _print_line(verdict: StageVerdict, headed: bool, quiet: bool = False) -> None:
    from rich.console import Console
    from rich.text import Text

    seconds = "" if verdict.outcome == "skipped" else f", {verdict.seconds:.0f} s"
    line = Text("" if headed else _head(verdict.stage))
    line.append(f"{verdict.outcome:<8}", _COLOURS[verdict.outcome])
    line.append(f" {' '.join(verdict.result.split())}{seconds}")
    Console(stderr=quiet).print(line, soft_wrap=True)


def _counts(results: Results) -> str:
    outcomes = [verdict.outcome for verdict in results.verdicts]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in _COLOURS)
