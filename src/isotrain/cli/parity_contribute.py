"""`isotrain parity contribute`: compare one device with the runs that come with isotrain."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from isotrain import api
from isotrain.errors import DataError

if TYPE_CHECKING:
    from isotrain.parity.certify.certificate import Certificate
    from isotrain.parity.verdict import Verdict


def contribute(
    out: Annotated[Path, Option(metavar="DIR", help="Directory for runs, reports and certificates.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Reference runs: sft, dpo, grpo; default all."),
    ] = None,
    device: Annotated[str, Option(metavar="TYPE", help="As device.type in recipes.")] = "auto",
) -> None:
    """Train the reference runs that come with isotrain on this machine's device, and certify that they agree.

    One device is enough: the other side was recorded on a CPU. Models are tiny, nothing is downloaded. GRPO
    trains on recorded responses, so no rollout engine is needed. Every file that is written is yours to look
    at; nothing is sent anywhere.

    Exit code 0: every computation is the same; 1: one is different; 2: one is inconclusive.

    Examples:

        isotrain parity contribute --out work/contribute

        isotrain parity contribute sft grpo --out work/contribute
    """
    from isotrain.cli.parity import show
    from isotrain.cli.parity_certify import issue
    from isotrain.parity.certify.certificate import read_certificate
    from isotrain.parity.certify.reference_runs import find_reference, reference_runs
    from isotrain.parity.certify.run import Certified
    from isotrain.parity.protocol import Companions, verdict_on

    chosen = [find_reference(name) for name in names or reference_runs()]
    if not chosen:
        raise DataError(
            "this installation has no reference runs; install isotrain from its wheel or repository"
        )
    verdicts: dict[str, Verdict] = {}
    written: list[Path] = []
    for number, reference in enumerate(chosen, start=1):
        typer.echo(f"\n{number} of {len(chosen)}: {reference.name} on {device}")
        begun = time.monotonic()
        run = _train(reference.path, [*reference.settings(), f"device.type={device}"], out / reference.name)
        companions = Companions(reference.members)
        verdict = verdict_on(reference.path, run, companions)
        show(verdict)
        _report(verdict, out / f"{reference.name}-report")
        typer.echo(f"{reference.name}: {time.monotonic() - begun:.0f} s")
        verdicts[reference.name] = verdict
        if path := issue(Certified(verdict, companions), out):
            written.append(path)
    if written:
        typer.echo("\nEach certificate contains:")
        for line in _contents(read_certificate(written[0])):
            typer.echo(f"  {line}")
        typer.echo(
            "\nTo contribute: read the files, sign them with `isotrain parity sign FILE --key KEY`, and open "
            "a pull request that adds both to certificates/."
        )
    raise typer.Exit(max(verdict.exit_code("computation") for verdict in verdicts.values()))


def _train(reference: Path, settings: list[str], out: Path) -> Path:
    from isotrain.observe.run_directory import RunDirectory
    from isotrain.recipe.load import load_resolved, other_run

    recorded = load_resolved(RunDirectory(reference).resolved)
    online = ["rollout.record=false"] if recorded.rollout is not None else []
    return api.train(recorded, *online, *settings, *other_run(out)).path


def _report(verdict: Verdict, directory: Path) -> None:
    from isotrain.parity.compare.power import load_power
    from isotrain.parity.report.write import write_report

    write_report(verdict, directory, power=load_power())
    typer.echo(f"wrote {directory / 'report.html'}")


def _contents(certificate: Certificate) -> list[str]:
    """What leaves this machine with a certificate."""
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
