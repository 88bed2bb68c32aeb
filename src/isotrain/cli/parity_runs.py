"""`isotrain parity record`, `replay`, `probe` and `sampler`: runs that others are compared with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from isotrain import api
from isotrain.cli.arguments import AsJson, Overrides, RecipeName
from isotrain.cli.parity import Require, compare
from isotrain.errors import DataError
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.load import load_resolved, other_run, path_override
from isotrain.recipe.online import OnlineSection
from isotrain.recipe.schema import Recipe
from isotrain.terminal import rich_console

if TYPE_CHECKING:
    from isotrain.tools.parity.levels.sampler import SamplerResult


def record(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Train a recipe as the reference, with all that a later replay needs.

    An online recipe also writes every response with its log-probs and scores (rollout.record). Other recipes
    need no recording: seed and data determine the run. With device.mesh, layers are not recorded.

    Example:

        isotrain parity record tiny-grpo output=runs/here
    """
    from isotrain.tools.parity.certify.run import TRACED, UNTRACED

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
    from isotrain.tools.parity.certify.run import UNTRACED

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
    from isotrain.engine.checkpoint.resume_point import copy_checkpoint

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


def truth(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run with a layer trace.")],
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Run directory of the truth; by default RUN/truth.")
    ] = None,
    routes: Annotated[
        Path | None,
        Option(
            metavar="OTHER", help="Send tokens to the experts of this run; then the default is OTHER/truth."
        ),
    ] = None,
    plan: Annotated[bool, Option("--plan", help="Only print the memory and disk that it needs.")] = False,
) -> None:
    """Repeat the first recorded step of a run in float64 on this host, and record its layers.

    Casts to narrower types inside the model are widened, so every operator computes in float64. One layer
    and the head are in float64 at a time. With an online recipe, log-probs and values from before the update
    stay as the run computes them. With device.mesh there is nothing to compare with. Tokens of a mixture go
    to the experts that the run, or with --routes another run of its recipe, has sent them to.

    Examples:

        isotrain parity truth runs/here

        isotrain parity truth runs/here --routes runs/there

        isotrain parity truth runs/here --plan
    """
    recipe = _recipe_of(run)
    if not recipe.observe.layer_trace:
        raise DataError(f"{run} has no layer trace; train it with observe.layer_trace=1")
    if plan:
        typer.echo(_memory_plan(recipe))
        return
    out = out or (routes or run) / "truth"
    after = recipe.observe.layer_trace_after
    _force_routes(routes or run, after + 1, out)
    if after:
        from isotrain.engine.checkpoint.resume_point import copy_checkpoint

        copy_checkpoint(RunDirectory(run).checkpoints, after, RunDirectory(out).checkpoints)
    changed = list(_IN_FLOAT64)
    if recipe.model.attention == "flash":
        changed.append("model.attention=sdpa")
    if isinstance(recipe.algorithm, OnlineSection):
        assert recipe.rollout is not None
        changed += ["rollout.record=false", path_override("rollout.replay", recipe.rollout.replay or run)]
    typer.echo(_memory_plan(recipe), err=True)
    api.train(recipe, *changed, *other_run(out), in_process=True)
    typer.echo(f"truth: {out}")


_IN_FLOAT64 = (
    *("device.type=cpu", "device.ranks=1", "model.dtype=float32", "model.fused=off", "model.compile=false"),
    *("model.gradient_checkpointing=true", "model.offload={}", "trainer.save_every=0"),
    *("observe.truth=true", "observe.layer_trace=1", "observe.operators=false", "observe.loggers=[]"),
)
"""The weights as the optimizer has them, and layer by layer; the probe widens what they compute."""


def _force_routes(run: Path, step: int, out: Path) -> None:
    """Put the trace that has them where the truth looks for them."""
    from isotrain.tools.probes.routes import FORCED

    trace = RunDirectory(run).layer_trace / f"step-{step:06d}-rank-00000.safetensors"
    if not trace.is_file():
        raise DataError(f"{run} has no {trace.name} in its layer trace; train it with observe.layer_trace=1")
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(trace, out / FORCED)


def _memory_plan(recipe: Recipe) -> str:
    from isotrain.models.files import model_directory
    from isotrain.models.load import build_causal_lm
    from isotrain.tools.probes.truth import memory_of

    tokens = recipe.data.tokens_per_micro_batch or recipe.data.max_length
    memory = memory_of(build_causal_lm(model_directory(recipe.model.path), "sdpa"), tokens)
    return (
        f"truth: at most {memory.total / 1e9:.1f} GB of memory and {memory.disk / 1e9:.1f} GB of disk for "
        f"micro-batches of {tokens} tokens"
    )


def _recipe_of(run: Path) -> Recipe:
    recorded = RunDirectory(run).resolved
    if not recorded.is_file():
        raise DataError(f"{run} is not a run directory: it has no {recorded.name}")
    return load_resolved(recorded)


# Rounding at a boundary where the engine computes in sixteen bits, of probability and of log-probs.
_ROUGH = 0.01
_STYLES = {"same": "bold green", "different": "bold red", "inconclusive": "bold yellow"}


def sampler(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="An online run with rollout.record=true.")],
    step: Annotated[int, Option(min=1, help="The step whose responses are tested.")] = 1,
    model: Annotated[
        Path | None,
        Option(metavar="DIR", help="The weights after the step before; by default those of the first step."),
    ] = None,
    positions: Annotated[int, Option(min=1, help="How many drawn tokens at most.")] = 4000,
    temperature: Annotated[float | None, Option(help="Test against another temperature.")] = None,
    top_p: Annotated[float | None, Option(help="Test against another top-p.")] = None,
    top_k: Annotated[int | None, Option(help="Test against another top-k.")] = None,
    as_json: AsJson = False,
) -> None:
    """Test the tokens that an engine drew against probabilities computed here.

    Exit code 0: drawn as asked; 1: not; 3: too few tokens to tell.

    Examples:

        isotrain parity sampler runs/here

        isotrain export runs/here --step 40 --out work/step-40

        isotrain parity sampler runs/here --step 41 --model work/step-40
    """
    from isotrain.tools.parity.verdict import EXIT_CODES

    result = result_of(
        run, step, model, positions=positions, temperature=temperature, top_p=top_p, top_k=top_k
    )
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2))
    else:
        show_sampler(result)
    raise typer.Exit(EXIT_CODES[result.verdict])


def result_of(
    run: Path,
    step: int = 1,
    model: Path | None = None,
    *,
    positions: int = 4000,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
) -> SamplerResult:
    """The verdict on a recorded step; what is not given is as the run was asked to draw."""
    from isotrain.errors import RecipeError
    from isotrain.tools.parity.levels.drawn import Drawn, Settings
    from isotrain.tools.parity.levels.sampler import judge_sampler
    from isotrain.trainers.online.drawn_tokens import drawn_tokens, read_recorded_step

    recorded = read_recorded_step(run, step, model)
    try:
        settings = Settings(
            temperature=recorded.temperature if temperature is None else temperature,
            top_p=recorded.top_p if top_p is None else top_p,
            top_k=(recorded.top_k or -1) if top_k is None else top_k,
            epsilon=Settings.epsilon if recorded.dtype == "float32" else _ROUGH,
        )
    except ValueError as error:
        raise RecipeError(str(error)) from None
    drawn = Drawn(settings)
    for logits_QV, tokens_Q in drawn_tokens(recorded, positions):
        drawn.add(logits_QV, tokens_Q)
    return judge_sampler(drawn)


def show_sampler(result: SamplerResult) -> None:
    """The verdict in words first, then what it rests on."""

    console = rich_console(highlight=False, markup=False)
    console.print(result.words, style=_STYLES[result.verdict], soft_wrap=True)
    for part in result.parts:
        mark, style = ("WRONG", "red") if part.rejected else ("right", "green")
        console.print(f"  {mark}  {part.name}: {part.words}; p = {part.p:.2g}", style=style, soft_wrap=True)
