"""`isotrain parity record` and `replay`: train on two devices from the same responses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from isotrain import api
from isotrain.cli.arguments import Overrides, RecipeName
from isotrain.cli.parity import compare
from isotrain.cli.parity_options import Require
from isotrain.errors import DataError
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.load import load_resolved, path_override
from isotrain.recipe.online import OnlineSection


def record(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Train a recipe as the reference, with all that a later replay needs.

    An online recipe also writes every response with its log-probs and scores (rollout.record). Other recipes
    need no recording: seed and data determine the run.

    Example:

        isotrain parity record tiny-grpo output=runs/here
    """
    from isotrain.parity.certify import TRACED

    changed = [*TRACED, *(overrides or [])]
    if isinstance(api.load_recipe(recipe, *changed).algorithm, OnlineSection):
        changed.append("rollout.record=true")
    run = api.train(recipe, *changed, in_process=True)
    typer.echo(
        f"recorded: {run.path}\nnext, on the other device: "
        f"isotrain parity replay {run.path} --out DIR device.type=TYPE"
    )


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run that `isotrain parity record` made.")],
    out: Annotated[Path, Option(metavar="DIR", help="Run directory of the replay.")],
    overrides: Overrides = None,
) -> None:
    """Train a recorded run again on this device from the same data, and compare the two runs.

    An online replay uses the recorded responses and scores: no engine samples, so rounding cannot change the
    text. It recomputes everything else: log-probs, values, advantages, losses, updates.

    Output and exit code are those of `isotrain parity compare RUN DIR --require computation`; the first
    different layer is named.

    Examples:

        isotrain parity replay runs/here --out runs/there device.type=cpu

        isotrain parity replay runs/here --out runs/two-ranks device.ranks=2
    """
    recorded = RunDirectory(run).resolved
    if not recorded.is_file():
        raise DataError(f"{run} is not a run directory: it has no {recorded.name}")
    first, last = [], [path_override("output", out)]
    if isinstance(load_resolved(recorded).algorithm, OnlineSection):
        first, last = ["rollout.record=false"], [*last, path_override("rollout.replay", run)]
    api.train(load_resolved(recorded), *first, *(overrides or []), *last, in_process=True)
    typer.echo()
    compare(run, out, require=Require.computation)
