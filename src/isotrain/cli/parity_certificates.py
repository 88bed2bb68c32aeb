"""`isotrain parity verify` with its counterpart `sign`: certificates in the hands of people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

_MARKS = {"right": ("right", "green"), "wrong": ("WRONG", "red"), "not checked": ("-", "yellow")}


def verify(
    certificate: Annotated[Path, typer.Argument(metavar="CERTIFICATE", help="A file of certificates/.")],
    reference: Annotated[
        Path | None, Option(metavar="DIR", help="The reference's run, to compare with.")
    ] = None,
    candidate: Annotated[
        Path | None, Option(metavar="DIR", help="The candidate's run, to compare with.")
    ] = None,
    allowed_signers: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="Who may sign, as ssh has it; by default the list beside the certificate."
        ),
    ] = None,
) -> None:
    """Check a certificate: its digest, its figures from the curves in it, its verdict, its signature.

    With the runs' directories, their files, curves and devices are compared with what the certificate says.

    Exit code 0: nothing is wrong; 1: something is.

    Examples:

        isotrain parity verify certificates/NAME.json

        isotrain parity verify NAME.json --reference runs/here --candidate runs/there
    """
    from rich.console import Console

    from isotrain.parity.figures import levels_again
    from isotrain.parity.verify import is_valid
    from isotrain.parity.verify import verify as check

    given = {"reference": reference, "candidate": candidate}
    runs = {role: path for role, path in given.items() if path is not None}
    findings = check(certificate, runs, allowed_signers, again=levels_again)
    console = Console(highlight=False, markup=False)
    for finding in findings:
        mark, style = _MARKS[finding.state]
        console.print(f"{mark:<6} {finding.name}: {finding.words}", style=style, soft_wrap=True)
    if not is_valid(findings):
        console.print("not valid", style="red")
        raise typer.Exit(1)
    console.print("valid: what was checked holds", style="green")


def sign(
    certificate: Annotated[Path, typer.Argument(metavar="CERTIFICATE", help="A file of certificates/.")],
    key: Annotated[Path, Option(metavar="FILE", help="A private key of ssh, or a .pub of one in ssh-agent.")],
) -> None:
    """Sign a certificate with a key of ssh; the signature is written beside it.

    Example:

        isotrain parity sign certificates/NAME.json --key ~/.ssh/id_ed25519
    """
    from isotrain.parity.signing import sign as sign_file

    typer.echo(f"wrote {sign_file(certificate, key)}")
