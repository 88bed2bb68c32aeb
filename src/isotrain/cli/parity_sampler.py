"""`isotrain parity sampler`: are tokens drawn from the probabilities that they should be drawn from?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

if TYPE_CHECKING:
    from isotrain.parity.levels.sampler import SamplerResult

# Rounding at a boundary where the engine computes in sixteen bits, of probability and of log-probs.
_ROUGH = 0.01
_EXIT = {"same": 0, "different": 1, "inconclusive": 2}
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
    as_json: Annotated[bool, Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    """Test the tokens that an engine drew against probabilities computed here.

    Exit code 0: drawn as asked; 1: not; 2: too few tokens to tell.

    Examples:

        isotrain parity sampler runs/here

        isotrain export runs/here --step 40 --out work/step-40

        isotrain parity sampler runs/here --step 41 --model work/step-40
    """
    result = result_of(
        run, step, model, positions=positions, temperature=temperature, top_p=top_p, top_k=top_k
    )
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2))
    else:
        show_sampler(result)
    raise typer.Exit(_EXIT[result.verdict])


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
    from isotrain.parity.levels.drawn import Drawn, Settings
    from isotrain.parity.levels.sampler import judge_sampler
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
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(result.words, style=_STYLES[result.verdict], soft_wrap=True)
    for part in result.parts:
        mark, style = ("WRONG", "red") if part.rejected else ("right", "green")
        console.print(f"  {mark}  {part.name}: {part.words}; p = {part.p:.2g}", style=style, soft_wrap=True)
