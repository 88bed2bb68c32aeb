"""`isotrain parity record`, `replay` and `probe`: train on two devices from the same responses."""

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
from isotrain.recipe.load import load_resolved, other_run, path_override
from isotrain.recipe.online import OnlineSection
from isotrain.recipe.schema import Recipe


def record(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Train a recipe as the reference, with all that a later replay needs.

    An online recipe also writes every response with its log-probs and scores (rollout.record). Other recipes
    need no recording: seed and data determine the run. With device.mesh, layers are not recorded.

    Example:

        isotrain parity record tiny-grpo output=runs/here
    """
    from isotrain.parity.certify.run import TRACED, UNTRACED

    meshed = api.load_recipe(recipe, *(overrides or [])).device.mesh.is_used
    changed = [*(UNTRACED if meshed else TRACED), *(overrides or [])]
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
    from isotrain.parity.certify.run import UNTRACED

    recipe = _recipe_of(run)
    meshed = api.load_recipe(recipe, *UNTRACED, *(overrides or [])).device.mesh.is_used
    first, last = list(UNTRACED if meshed else ()), other_run(out)
    if isinstance(recipe.algorithm, OnlineSection):
        first, last = [*first, "rollout.record=false"], [*last, path_override("rollout.replay", run)]
    api.train(recipe, *first, *(overrides or []), *last, in_process=True)
    typer.echo()
    compare(run, out, require=Require.computation)


def probe(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run with a checkpoint of that step.")],
    step: Annotated[int, Option(min=1, help="The step whose checkpoint it starts from.")],
    out: Annotated[Path, Option(metavar="DIR", help="Run directory of the probe.")],
    steps: Annotated[int, Option(min=1, help="How many steps to record.")] = 3,
    reference: Annotated[
        Path | None, Option(metavar="DIR", help="The probe of the other device, to compare with.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Record a few steps in the middle of a run, layer by layer, from one of its checkpoints.

    Run it on both devices, with the same RUN (copy its directory): both then compute the same steps from the
    same weights, optimizer state and data. It finds what does not show in the first steps, such as a mistake
    that needs trained weights. An online run uses its recorded responses (`isotrain parity record`).

    With --reference, output and exit code are those of `isotrain parity compare REFERENCE DIR --require
    computation`; the first different layer is named.

    Examples:

        isotrain parity probe runs/here --step 500 --out runs/here-500

        isotrain parity probe runs/here --step 500 --out runs/there-500 --reference runs/here-500
    """
    recipe = _recipe_of(run)
    from isotrain.engine.checkpoint.copy import copy_checkpoint

    copy_checkpoint(RunDirectory(run).checkpoints, step, RunDirectory(out).checkpoints)
    changed = ["trainer.save_every=0"]
    if isinstance(recipe.algorithm, OnlineSection):
        assert recipe.rollout is not None
        replayed = recipe.rollout.replay or run
        changed += ["rollout.record=false", path_override("rollout.replay", replayed)]
    traced = [f"observe.layer_trace={steps}", f"observe.layer_trace_after={step}"]
    changed += [*(overrides or []), *traced, *other_run(out)]
    api.train(recipe, *changed, in_process=True)
    typer.echo()
    if reference is not None:
        compare(reference, out, require=Require.computation)  # ends with its exit code
    typer.echo(
        f"probed: {out}\nnext, on the other device: isotrain parity probe {run} --step {step} --out DIR "
        f"--reference {out} device.type=TYPE"
    )


def _recipe_of(run: Path) -> Recipe:
    recorded = RunDirectory(run).resolved
    if not recorded.is_file():
        raise DataError(f"{run} is not a run directory: it has no {recorded.name}")
    return load_resolved(recorded)
