"""`isotrain parity verify` and `sign`: check and sign certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

_MARKS = {"right": ("right", "green"), "wrong": ("WRONG", "red"), "not checked": ("-", "yellow")}


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
        Option(metavar="FILE", help="ssh allowed-signers file; by default the one beside the certificate."),
    ] = None,
) -> None:
    """Check the digest, metrics, verdict and signature of a certificate.

    With the run directories, also compare their files, curves and devices with the certificate.

    Exit code 0: the certificate is valid; 1: it is not.

    Examples:

        isotrain parity verify certificates/NAME.json

        isotrain parity verify NAME.json --reference runs/here --candidate runs/there
    """
    from rich.console import Console

    from isotrain.parity.figures import levels_again
    from isotrain.parity.verify import is_valid
    from isotrain.parity.verify import verify as check
    from isotrain.terminal import visible

    given = {"reference": reference, "candidate": candidate}
    runs = {role: path for role, path in given.items() if path is not None}
    findings = check(certificate, runs, allowed_signers, again=levels_again)
    console = Console(highlight=False, markup=False)
    for finding in findings:
        mark, style = _MARKS[finding.state]
        # One line each: a name of the certificate must not pretend to be a finding.
        line = visible(f"{mark:<6} {finding.name}: {finding.words}", one_line=True)
        console.print(line, style=style, soft_wrap=True)
    if not is_valid(findings):
        console.print("not valid", style="red")
        raise typer.Exit(1)
    console.print("valid: every check passed", style="green")


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
    from isotrain.parity.signing import sign as sign_file

    typer.echo(f"wrote {sign_file(certificate, key)}")
