"""`isotrain parity verify` and `sign`: check and sign certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

_OF_STATE = {"signed": "green", "unsigned": "yellow", "unlisted": "yellow", "wrong": "red"}
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
        Option(
            metavar="FILE",
            help="List of signers whom you trust, in ssh's format; by default isotrain's own.",
        ),
    ] = None,
) -> None:
    """Say whether a certificate is consistent, and separately who signed it.

    Consistent: digest, recorded environments, figures, levels and both answers fit the curves in the file and
    each other. With the run directories, their files, curves and devices are compared as well. This does
    not show who made the file; only a signature does.

    Exit code 0: consistent; 1: inconsistent, or a signature that is not of this file, or with
    --allowed-signers no signature by one of them.

    Examples:

        isotrain parity verify certificates/NAME.json

        isotrain parity verify NAME.json --reference runs/here --candidate runs/there
    """
    from rich.console import Console

    from isotrain.parity.certify.issue import levels_again
    from isotrain.parity.certify.signing import signature_of
    from isotrain.parity.certify.verify import is_consistent
    from isotrain.parity.certify.verify import verify as check
    from isotrain.terminal import visible

    given = {"reference": reference, "candidate": candidate}
    runs = {role: path for role, path in given.items() if path is not None}
    findings = check(certificate, runs, again=levels_again)
    console = Console(highlight=False, markup=False)
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
    from isotrain.parity.certify.signing import sign as sign_file

    typer.echo(f"wrote {sign_file(certificate, key)}")
