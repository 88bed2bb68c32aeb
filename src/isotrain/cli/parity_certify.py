"""`isotrain parity certify`: one recipe on two devices, through the levels, to a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from isotrain import api
from isotrain.cli.arguments import Overrides, RecipeName
from isotrain.errors import RecipeError

if TYPE_CHECKING:
    from isotrain.parity.certificate import Certificate, Subject
    from isotrain.parity.certify import Certified
    from isotrain.parity.children import Side
    from isotrain.recipe.schema import Recipe

# One command does not wait longer than this for a run.
_LONGEST_RUN = 7 * 86400.0


def certify(
    recipe: RecipeName,
    devices: Annotated[str, Option(metavar="A,B", help="Reference and candidate, such as cpu-avx2,cpu.")],
    work: Annotated[Path, Option(metavar="DIR", help="Directory for the runs; finished runs are reused.")],
    overrides: Overrides = None,
    budget: Annotated[
        str | None, Option(metavar="TIME", help="Time limit for all runs, such as 30m.")
    ] = None,
    members: Annotated[int, Option(min=0, help="Without a budget: number of envelope runs.")] = 8,
    seeds: Annotated[int, Option(min=0, help="Without a budget: number of further seeds.")] = 0,
    free: Annotated[
        bool, Option("--free", help="Online recipes: each device samples its own responses.")
    ] = False,
    certificates: Annotated[
        Path | None, Option(metavar="DIR", help="Directory to write the certificate to.")
    ] = None,
) -> None:
    """Train a recipe on two devices and certify that they agree, level by level.

    The levels run in order and stop at the first failure: operators, layers, curves with their envelope, and,
    if time allows, seeds. The report goes to the working directory.

    Exit code 0: the same computation, or with --free an equivalent outcome, with a certificate if
    --certificates is given; 1: different; 2: inconclusive.

    Example:

        isotrain parity certify tiny-sft --devices cpu-avx2,cpu --work work/parity --budget 10m
    """
    from isotrain.cli.parity import tell
    from isotrain.parity.budget import seconds_of
    from isotrain.parity.certify import Protocol
    from isotrain.parity.certify import certify as run_protocol
    from isotrain.parity.children import Children
    from isotrain.recipe import library

    reference, candidate = _sides(devices)
    _check_counts(members, seeds)
    path = library.locate(recipe)
    checked = api.load_recipe(path, *(overrides or []))
    online = checked.rollout is not None
    if free and not online:
        raise RecipeError("--free: only online recipes sample responses; remove it")
    children = Children(str(path), tuple(overrides or []), work.resolve(), _say, _LONGEST_RUN)
    protocol = Protocol(
        replays=online and not free,
        free_running=free,
        budget=None if budget is None else seconds_of(budget),
        members=members,
        seeds=seeds,
        seed=checked.seed,
    )
    found = run_protocol(children, reference, candidate, protocol, _say)
    tell(found.verdict, work / "report")
    kind = "free-running" if free else "replayed" if online else "paired"
    if certificates is not None:
        from isotrain.parity.certificate import write_certificate

        certificate = _certificate(found, checked, (reference.label, candidate.label), kind)
        if certificate.certifies:
            _say(f"wrote {write_certificate(certificates, certificate)}")
    raise typer.Exit(found.verdict.exit_code("outcome" if free else "computation"))


def _sides(devices: str) -> tuple[Side, Side]:
    from isotrain.device.backends import backend
    from isotrain.parity.children import Side

    labels = [label.strip() for label in devices.split(",")]
    if len(labels) != 2:
        raise RecipeError(f"--devices {devices}: give two, the reference first, such as cpu-avx2,cpu")
    first, second = (
        Side(chosen.label, (f"device.type={chosen.type}",), chosen.variables)
        for chosen in map(backend, labels)
    )
    return first, second


def _check_counts(members: int, seeds: int) -> None:
    """Check the arguments before any run starts."""
    from isotrain.parity.thresholds import FEWEST_MEMBERS, FEWEST_RUNS

    if 0 < members < FEWEST_MEMBERS or 0 < seeds < FEWEST_RUNS - 1:
        raise RecipeError(
            f"--members, --seeds: an envelope needs {FEWEST_MEMBERS} members, a spread {FEWEST_RUNS - 1} "
            "further seeds; give at least as many, or 0"
        )


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _certificate(found: Certified, recipe: Recipe, labels: tuple[str, str], kind: str) -> Certificate:
    from isotrain.parity.issue import certificate_of, is_simulated, other_inputs
    from isotrain.parity.sources.read import read_run

    comparison = found.verdict.comparison
    simulated = (is_simulated(comparison.reference), is_simulated(comparison.candidate))
    named = [f"{label}-simulated" if sim else label for label, sim in zip(labels, simulated, strict=True)]
    return certificate_of(
        found.verdict,
        subject=_subject(recipe, kind),
        labels=(named[0], named[1]),
        simulated=simulated,
        envelope={f"envelope-{n}": read_run(p) for n, p in enumerate(found.companions.reruns, start=1)},
        inputs=other_inputs(comparison, found.companions),
    )


def _subject(recipe: Recipe, kind: str) -> Subject:
    from isotrain.models.load import model_directory
    from isotrain.parity.certificate import CertifiedModel, Subject
    from isotrain.trainers.start import model_digest

    directory = model_directory(recipe.model.path)
    return Subject.model_validate(
        {
            "algorithm": recipe.algorithm.name,
            "model": CertifiedModel(name=_model_name(recipe.model.path), sha256=model_digest(directory)),
            "dtype": recipe.model.dtype,
            "engine": recipe.rollout.engine if recipe.rollout else "none",
            "kind": kind,
        }
    )


def _model_name(path: str) -> str:
    """The last meaningful part: directories are often called `model`."""
    parts = [part for part in Path(path).parts if part not in ("/", "model")]
    return parts[-1] if parts else "model"
