"""`isotrain runs`, `logs` and `export`: how far runs are, what they said, and their models."""

from __future__ import annotations

import json
import time
from codecs import getincrementaldecoder
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from isotrain.api import Run
from isotrain.errors import DataError
from isotrain.files import open_regular
from isotrain.observe.journal import RunStatus, find_runs, state_of
from isotrain.observe.run_directory import RunDirectory

_LONGEST_LINE = 1 << 16
_COLOURS = {"running": "green", "starting": "green", "failed": "red", "killed": "red", "stopped": "yellow"}


def runs(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where to look, three directories deep.")
    ] = Path("runs"),
    as_json: Annotated[bool, Option("--json", help="One JSON object per run and line.")] = False,
) -> None:
    """List runs: state, step, last metrics, and what they wait for.

    Examples:

        isotrain runs

        watch -n 5 isotrain runs experiments
    """
    if not directory.is_dir():
        raise DataError(f"there is no directory {directory}; give the one that holds your runs")
    states = find_runs(directory)
    if as_json:
        for run in states:
            typer.echo(json.dumps({**asdict(run), "path": str(run.path)}))
        return
    if not states:
        typer.echo(f"no runs in {directory}")
        return
    _show(states)


def _show(states: list[RunStatus]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("run", "algorithm", "state", "step", "last metrics", "", "ago", box=None, pad_edge=False)
    for run in states:
        table.add_row(
            Text(str(run.path), overflow="fold"),
            Text(run.algorithm),
            Text(run.state, style=_COLOURS.get(run.state, "")),
            Text(f"{run.step}/{run.steps}" if run.steps else str(run.step)),
            Text(run.metrics),
            Text(run.waiting[:200]),
            Text(_ago(run.seconds)),
        )
    Console().print(table)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def logs(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory: `output` of its recipe.")],
    lines: Annotated[int, Option("--lines", "-n", min=1, help="The last lines.")] = 50,
    follow: Annotated[bool, Option("--follow", "-f", help="Go on while the run does.")] = False,
) -> None:
    """Print what a run said: progress, warnings, and why it ended. Also of one that runs elsewhere.

    Examples:

        isotrain logs runs/tiny-grpo

        isotrain logs runs/tiny-grpo -f
    """
    path = RunDirectory(run).log
    try:
        with open_regular(path) as file:
            # In blocks and in lines of a bounded length: a log from elsewhere may be one line of any size.
            last = deque(iter(lambda: file.readline(_LONGEST_LINE), b""), maxlen=lines)
            typer.echo(b"".join(last).decode("utf-8", "replace"), nl=False)
            decoder = getincrementaldecoder("utf-8")("replace")
            while follow:
                goes_on = state_of(run).state in ("starting", "running")
                while text := file.read(_LONGEST_LINE):
                    typer.echo(decoder.decode(text), nl=False)
                if not goes_on:
                    return
                time.sleep(0.5)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{run} has no log; is it a run directory? `isotrain runs` lists them") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory: `output` of its recipe.")],
    out: Annotated[Path, Option(help="The directory to write the model to.")],
    step: Annotated[
        int | None, Option(min=0, help="The checkpoint to export; the newest by default.")
    ] = None,
    adapter: Annotated[
        bool, Option("--adapter", help="Write only the LoRA adapter, not the merged model.")
    ] = False,
) -> None:
    """Write a checkpoint as a model that transformers, vLLM and others load.

    Example:

        isotrain export runs/tiny-sft --out models/tiny-sft
    """
    typer.echo(f"wrote {Run(run).export(out, step, adapter_only=adapter)}")
