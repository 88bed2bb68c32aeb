"""`isotrain runs`, `logs`, `view` and `export`: how far runs are, what they said, and their models."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from isotrain.cli.arguments import RunPath
from isotrain.errors import DataError
from isotrain.files import open_regular
from isotrain.observe.journal import RunStatus, find_runs, state_of
from isotrain.observe.run_directory import RunDirectory
from isotrain.terminal import rich_console

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
    from rich.table import Table
    from rich.text import Text

    table = Table("run", "algorithm", "state", "step", "last metrics", "", "ago", box=None, pad_edge=False)
    for run in states:
        table.add_row(
            Text(str(run.path), overflow="fold"),
            Text(run.algorithm),
            Text(run.state, style=_COLOURS.get(run.state, "")),
            Text(f"{run.step}/{run.steps}" if run.steps else str(run.step)),
            Text(run.metrics, no_wrap=True, overflow="ellipsis"),
            Text(run.waiting[:200], no_wrap=True, overflow="ellipsis"),
            Text(_ago(run.seconds)),
        )
    rich_console().print(table)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def logs(
    run: RunPath,
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
                is_running = state_of(run).state in ("starting", "running")
                while text := file.read(_LONGEST_LINE):
                    typer.echo(decoder.decode(text), nl=False)
                if not is_running:
                    return
                time.sleep(0.5)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{run} has no log; is it a run directory? `isotrain runs` lists them") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error


def export(
    run: RunPath,
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
    from isotrain.api import Run

    typer.echo(f"wrote {Run(run).export(out, step, adapter_only=adapter)}")


def view(
    run: RunPath,
    other: Annotated[
        Path | None, typer.Argument(metavar="[RUN2]", help="A second run, drawn over the first.")
    ] = None,
    export: Annotated[
        Path | None, Option(metavar="PAGE.html", help="Write one file that opens offline, and end.")
    ] = None,
    trajectories: Annotated[
        int, Option(min=0, max=5000, help="With --export: how many trajectories of each run, at most.")
    ] = 200,
    tokenizer: Annotated[
        Path | None, Option(metavar="DIR", help="Model directory to decode with; by default the recipe's.")
    ] = None,
    port: Annotated[int, Option(min=0, max=65535, help="The port of the page; 0 is any free one.")] = 0,
    no_open: Annotated[bool, Option("--no-open", help="Print the address only.")] = False,
) -> None:
    """Show curves and recorded trajectories of a run in the browser, also while it trains.

    The page is for this machine only. Trajectories are there if the recipe has `rollout.record: true`.

    Examples:

        isotrain view runs/tiny-grpo

        isotrain view runs/first runs/second --export page.html
    """
    from isotrain.tools.view.run import RunView

    runs = [RunView(path, tokenizer) for path in (run, other) if path is not None]
    if export is not None:
        from isotrain.tools.view.export import export as write

        shown, recorded = write(runs, export, trajectories)
        typer.echo(f"wrote {export} with {shown:,} of {recorded:,} recorded trajectories")
        return
    from isotrain.tools.view.server import ViewServer

    with ViewServer(runs, port) as server:
        typer.echo(f"{server.url}\nCtrl-C ends it. From another machine, forward the port first:")
        typer.echo(f"ssh -L {server.server_address[1]}:127.0.0.1:{server.server_address[1]} HOST")
        with ExitStack() as stack:
            if not no_open and _has_a_screen():
                import webbrowser

                webbrowser.open(stack.enter_context(_page_that_leads_to(server.url)).as_uri())
            try:
                server.serve_forever(poll_interval=0.2)
            except KeyboardInterrupt:
                typer.echo("ended")


@contextmanager
def _page_that_leads_to(url: str) -> Iterator[Path]:
    """A file that only this user can read: all users see a browser's arguments, and the URL has the key."""
    with tempfile.TemporaryDirectory(prefix="isotrain-view-") as directory:
        page = Path(directory) / "open.html"
        page.touch(0o600)
        page.write_text(
            f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">\n'
            f'<a href="{url}">isotrain view</a>\n'
        )
        yield page


def _has_a_screen() -> bool:
    """Without one, `webbrowser` would start a text browser in this terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
