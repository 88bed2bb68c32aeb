"""`isotrain profile`: where the time of a run's profiled steps goes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Annotated

import typer
from typer import Option

from isotrain.cli.arguments import AsJson, RunPath
from isotrain.errors import install
from isotrain.observe.run_directory import RunDirectory
from isotrain.observe.spans import read_spans


def profile(
    run: RunPath,
    step: Annotated[
        int | None, Option(min=1, help="One of the profiled steps; by default all of them together.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say where the time of a step goes, who waits for whom, and which recipe field would change it.

    The run was trained with the steps to look at, such as `observe.profile.steps=[3,4]`. Draws the same as a
    timeline to plots/timeline.png.

    Examples:

        isotrain train tiny-grpo observe.profile.steps=[3,4]

        isotrain profile runs/tiny-grpo
    """
    from isotrain.tools.profile.analyse import profile_of

    directory = RunDirectory(run)
    steps = read_spans(directory)
    found = profile_of(directory, steps if step is None else {step: steps.get(step, [])})
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        typer.echo("\n".join(found.lines()))
    picture = directory.plots / "timeline.png"
    if find_spec("matplotlib") is None:
        typer.echo(f"no picture without the package 'matplotlib': {install('train')}", err=True)
        return
    from isotrain.tools.profile.picture import draw

    draw(steps, run.resolve().name, picture)
    if not as_json:
        typer.echo(f"drawn: {picture}")
