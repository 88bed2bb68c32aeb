"""`isotrain parity certify`, `contribute`, `verify` and `sign`: certificates of two devices, or one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from isotrain import api
from isotrain.cli.arguments import Overrides, paths_of, values_of
from isotrain.errors import RecipeError
from isotrain.terminal import rich_console

if TYPE_CHECKING:
    from isotrain.recipe.schema import Recipe
    from isotrain.tools.parity.certify.certificate import Certificate
    from isotrain.tools.parity.certify.run import Certified, Extent, TrainedSide


# One command does not wait longer than this for a run.
_LONGEST_RUN = 7 * 86400.0
_MARKS = {"right": ("right", "green"), "wrong": ("WRONG", "red"), "not checked": ("-", "yellow")}
_OF_STATE = {"signed": "green", "unsigned": "yellow", "unlisted": "yellow", "wrong": "red"}


def certify(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")
    ] = None,
    overrides: Overrides = None,
    devices: Annotated[
        str | None, Option(metavar="A,B", help="Reference and candidate, such as cpu-avx2,cpu.")
    ] = None,
    candidate: Annotated[
        str | None,
        Option(
            metavar="KEY=VALUE ...",
            help="Changes for the candidate alone, such as device.ranks=2 device.mesh.context=2.",
        ),
    ] = None,
    work: Annotated[
        Path | None,
        Option(metavar="DIR", help="Directory for the runs and the report; finished runs are reused."),
    ] = None,
    from_runs: Annotated[
        str | None,
        Option(
            "--from",
            metavar="RUN RUN ...",
            help="Certify finished runs, also of two machines: the reference, the candidate, then reruns of "
            "the reference.",
        ),
    ] = None,
    budget: Annotated[
        str | None, Option(metavar="TIME", help="Time limit for all runs, such as 30m.")
    ] = None,
    members: Annotated[int, Option(min=0, help="Without a budget: number of envelope runs.")] = 8,
    seeds: Annotated[int, Option(min=0, help="Without a budget: number of further seeds.")] = 0,
    truth: Annotated[
        bool,
        Option("--truth/--no-truth", help="Repeat the traced step in float64 on this host, and judge by it."),
    ] = True,
    free: Annotated[
        bool, Option("--free", help="Online recipes: each device samples its own responses.")
    ] = False,
    certificates: Annotated[
        Path | None, Option(metavar="DIR", help="Directory to write the certificate to.")
    ] = None,
) -> None:
    """Train a recipe on two devices and certify that they agree, level by level; or certify finished runs.

    Levels run in order up to the first failure: operators, layers, curves, envelope, seeds. Where operators
    and layers are right against float64, no envelope is needed. Runs with device.mesh record neither.

    Exit code 0: the same computation, or with --free an equivalent outcome; 1: different; 3: inconclusive.

    Examples:

        isotrain parity certify tiny-sft --devices cpu-avx2,cpu --work work/parity --budget 10m

        isotrain parity certify tiny-sft --devices cpu,cpu --work work/ring --candidate device.ranks=2
        device.mesh.context=2 device.mesh.context_attention=ring

        isotrain parity certify --from runs/here runs/there runs/here-{2,3,4} --certificates certificates
    """
    from isotrain.cli.parity import tell
    from isotrain.tools.parity.certify.run import Extent, seconds_of

    if from_runs is not None:
        if any(given is not None for given in (recipe, devices, candidate, budget)):
            raise RecipeError("--from: remove the recipe, --devices, --candidate and --budget")
        certified = _judge(paths_of(from_runs), free)
    elif recipe is None or devices is None or work is None:
        raise RecipeError("give a recipe, --devices A,B and --work DIR; or --from RUN RUN with finished runs")
    else:
        changed = values_of(candidate) if candidate is not None else []
        extent = Extent(None if budget is None else seconds_of(budget), members, seeds, truth)
        certified = _train(recipe, overrides or [], devices, changed, work, extent, free)
    verdict = certified.verdict.deciding("outcome" if free else "computation")
    tell(verdict, work / "report" if work is not None else None)
    if certificates is not None:
        issue(certified, certificates)
    raise typer.Exit(verdict.exit_code)


def issue(certified: Certified, directory: Path) -> Path | None:
    """Writes the certificate of runs that agree."""
    from isotrain.tools.parity.certify.certificate import write_certificate
    from isotrain.tools.parity.certify.issue import certificate_of, other_inputs

    certificate = certificate_of(
        certified.verdict,
        inputs=other_inputs(certified.verdict.comparison, certified.companions),
    )
    if not certificate.certifies:
        return None
    path = write_certificate(directory, certificate)
    _say(f"wrote {path}")
    return path


def _judge(runs: Sequence[Path], free: bool) -> Certified:
    """The verdict on runs that were made before, on this machine or on others."""
    from isotrain.tools.parity.certify.run import Certified
    from isotrain.tools.parity.protocol import Companions, verdict_on

    if len(runs) < 2:
        raise RecipeError("--from: give the reference and the candidate, then reruns of the reference")
    reference, candidate, *reruns = runs
    companions = Companions(reruns)
    return Certified(verdict_on(reference, candidate, companions, free_running=free), companions)


def _train(
    recipe: str,
    overrides: Sequence[str],
    devices: str,
    changed: Sequence[str],
    work: Path,
    extent: Extent,
    free: bool,
) -> Certified:
    """Runs on both devices; `changed` is for the candidate."""
    from isotrain.recipe import library
    from isotrain.tools.parity.certify.run import UNTRACED, CertifyPlan, Children, member_settings
    from isotrain.tools.parity.certify.run import certify as run_protocol

    reference, candidate = _sides(devices)
    _check_counts(extent)
    path = library.locate(recipe)
    checked = api.load_recipe(path, *overrides)
    other = api.load_recipe(path, *overrides, *UNTRACED, *changed) if changed else checked
    _check_changes(checked, other, changed)
    online = checked.rollout is not None
    if free and not online:
        raise RecipeError("--free: only online recipes sample responses; remove it")
    reference = replace(reference, traced=not checked.device.mesh.is_used)
    settings = (*candidate.settings, *changed)
    candidate = replace(candidate, settings=settings, traced=not other.device.mesh.is_used)
    children = Children(str(path), tuple(overrides), work.resolve(), _say, _LONGEST_RUN)
    protocol = CertifyPlan(
        replays=online and not free,
        free_running=free,
        extent=extent,
        # On a host there are always two; whether there is a second accelerator, the recipe does not say.
        members_of=partial(member_settings, checked, ranks=not online and devices.startswith("cpu")),
        seed=checked.seed,
    )
    return run_protocol(children, reference, candidate, protocol, _say)


def _sides(devices: str) -> tuple[TrainedSide, TrainedSide]:
    from isotrain.observe.environment import cpu_features
    from isotrain.tools.parity.certify.run import TrainedSide
    from isotrain.tools.parity.devices import backend, missing_instructions

    labels = [label.strip() for label in devices.split(",")]
    if len(labels) != 2:
        raise RecipeError(f"--devices {devices}: give two, the reference first, such as cpu-avx2,cpu")
    features = cpu_features()
    for label in labels:
        if missing := missing_instructions(label, features):
            raise RecipeError(
                f"--devices {devices}: this processor has no {missing}, so {label} computes what others do"
            )
    first, second = (
        TrainedSide(chosen.label, (f"device.type={chosen.type}",), chosen.variables)
        for chosen in map(backend, labels)
    )
    return first, second


def _check_changes(reference: Recipe, candidate: Recipe, changed: Sequence[str]) -> None:
    """Changes that make it another training would be found after both runs; here they cost nothing."""
    from isotrain.recipe.difference import MAY_DIFFER_IN_PARITY, difference, not_free

    if any(change.partition("=")[0] == "device.type" for change in changed):
        raise RecipeError("--candidate device.type: --devices A,B has the types of both; remove it")
    if other := not_free(difference(reference, candidate), MAY_DIFFER_IN_PARITY):
        raise RecipeError(
            f"--candidate: {other[0]} is another training; change only how to compute, as with device.ranks"
        )


def _check_counts(extent: Extent) -> None:
    """Check the arguments before any run starts."""
    from isotrain.tools.parity.thresholds import FEWEST_MEMBERS, FEWEST_RUNS

    if 0 < extent.members < FEWEST_MEMBERS or 0 < extent.seeds < FEWEST_RUNS - 1:
        raise RecipeError(
            f"--members, --seeds: an envelope needs {FEWEST_MEMBERS} members, a spread {FEWEST_RUNS - 1} "
            "further seeds; give at least as many, or 0"
        )


def _say(line: str) -> None:
    typer.echo(line, err=True)


def contribute(
    out: Annotated[Path, Option(metavar="DIR", help="Directory for runs, reports and certificates.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="sft, dpo, kto, rm, prm, grpo, ppo, reinforce++; all of them by default."
        ),
    ] = None,
    device: Annotated[str, Option(metavar="TYPE", help="As device.type in recipes.")] = "auto",
) -> None:
    """Certify this machine's device alone: it trains each algorithm, and is held against float64.

    One device is enough: its host repeats a step in float64, and trains the same recipe. The model is tiny
    and made here, nothing is downloaded. Every file that is written is yours to look at; nothing is sent
    anywhere.

    Exit code 0: every computation is the same; 1: one is different; 3: one is inconclusive.

    Examples:

        isotrain parity contribute --out work/contribute

        isotrain parity contribute sft grpo --out work/contribute
    """
    from isotrain.cli.parity import tell
    from isotrain.data.prepare.tiny import make_tiny
    from isotrain.device.detect import choose_device
    from isotrain.tools.parity.certify.certificate import read_certificate
    from isotrain.tools.parity.certify.contributed import contributed, recipe_of
    from isotrain.tools.parity.certify.run import Extent

    chosen = contributed(names or [])
    kind = choose_device(device).type
    # On a host alone, the other side is the same processor without its vector units.
    reference = "cpu-default" if kind == "cpu" else "cpu"
    # A certificate has the last part of a path, which is to say what model that is.
    model, data = out.resolve() / "tiny", out.resolve() / "data"
    if not model.exists():
        make_tiny(data, train_rows=1000)
        (data / "model").rename(model)
    codes: set[int] = set()
    written: list[Path] = []
    for number, name in enumerate(chosen, start=1):
        typer.echo(f"\n{number} of {len(chosen)}: {name} on {kind}, beside {reference}")
        begun = time.monotonic()
        recipe, settings = recipe_of(name, model, data)
        certified = _train(recipe, settings, f"{reference},{kind}", [], out / name, Extent(members=0), False)
        verdict = certified.verdict.deciding("computation")
        tell(verdict, out / f"{name}-report")
        typer.echo(f"{name}: {time.monotonic() - begun:.0f} s")
        codes.add(verdict.exit_code)
        if path := issue(certified, out):
            written.append(path)
    if written:
        typer.echo("\nEach certificate contains:")
        for line in _contents(read_certificate(written[0])):
            typer.echo(f"  {line}")
        typer.echo(
            "\nTo contribute: read the files, sign them with `isotrain parity sign FILE --key KEY`, and open "
            "a pull request that adds both to certificates/."
        )
    # One that is different is the answer, whatever is inconclusive beside it.
    raise typer.Exit(1 if 1 in codes else max(codes))


def _contents(certificate: Certificate) -> list[str]:
    """Everything that leaves this machine with a certificate."""
    side = certificate.candidate
    environment = side.environment
    steps = max(len(curve.steps) for curve in certificate.curves.values())
    versions = ", ".join(f"{name} {version}" for name, version in side.packages.items())
    variables = ", ".join(f"{name}={value}" for name, value in side.variables.items())
    return [
        f"device: {side.device} ({side.label}), ranks: {side.ranks}",
        f"host: {environment.get('platform')}, Python {environment.get('python')}, {environment.get('cpu')}",
        f"packages: {versions}",
        f"variables: {variables or 'none'}",
        f"curves: {len(certificate.curves)} metrics, up to {steps} steps",
        "the recipe, and both answers with what they rest on",
        "not in it: names of hosts and users, addresses, paths, commands, weights, texts",
    ]


def verify(
    certificate: Annotated[Path, typer.Argument(metavar="CERTIFICATE", help="A file of certificates/.")],
    reference: Annotated[
        Path | None, Option(metavar="DIR", help="The reference run, to check its files.")
    ] = None,
    candidate: Annotated[
        Path | None, Option(metavar="DIR", help="The candidate run, to check its files.")
    ] = None,
    allowed_signers: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="List of signers whom you trust, in ssh's format; by default isotrain's own.",
        ),
    ] = None,
) -> None:
    """Say whether a certificate is consistent, and separately who signed it.

    Consistent: the file is as it was made and, with the run directories, its inputs, curves and devices are
    theirs. Anyone can write such a file: whether to believe it depends on who signed it.

    Exit code 0: consistent; 1: inconsistent, or a signature that is not of this file, or with
    --allowed-signers no signature by one of them.

    Examples:

        isotrain parity verify certificates/NAME.json

        isotrain parity verify NAME.json --reference runs/here --candidate runs/there
    """

    from isotrain.terminal import visible
    from isotrain.tools.parity.certify.signing import signature_of
    from isotrain.tools.parity.certify.verify import is_consistent
    from isotrain.tools.parity.certify.verify import verify as check

    runs = {"reference": reference, "candidate": candidate}
    findings = check(certificate, {role: path for role, path in runs.items() if path is not None})
    console = rich_console(highlight=False, markup=False)
    for finding in findings:
        mark, style = _MARKS[finding.state]
        # One line each: a name of the certificate must not pretend to be a finding.
        line = visible(f"{mark:<6} {finding.name}: {finding.words}", one_line=True)
        console.print(line, style=style, soft_wrap=True)
    consistent = is_consistent(findings)
    console.print(
        f"\n{'consistent' if consistent else 'INCONSISTENT'}", style="green" if consistent else "red"
    )
    signature = signature_of(certificate, allowed_signers)
    console.print(
        visible(f"signature: {signature.words}", one_line=True),
        style=_OF_STATE[signature.state],
        soft_wrap=True,
    )
    # Whoever names signers asks for a signature of one of them.
    trusted = signature.state == "signed" or (allowed_signers is None and signature.state != "wrong")
    if allowed_signers is not None and not trusted:
        console.print("NOT SIGNED by anybody in the list of --allowed-signers", style="red")
    if not consistent or not trusted:
        raise typer.Exit(1)


def sign(
    certificate: Annotated[Path, typer.Argument(metavar="CERTIFICATE", help="A file of certificates/.")],
    key: Annotated[
        Path, Option(metavar="FILE", help="An ssh private key, or the .pub of a key in ssh-agent.")
    ],
) -> None:
    """Sign a certificate with an ssh key; the signature goes beside it.

    Example:

        isotrain parity sign certificates/NAME.json --key ~/.ssh/id_ed25519
    """
    from isotrain.tools.parity.certify.signing import sign as sign_file

    typer.echo(f"wrote {sign_file(certificate, key)}")
