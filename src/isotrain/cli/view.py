"""`isotrain view`: curves and recorded trajectories of runs in the browser."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer import Option


def view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory: `output` of its recipe.")],
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
