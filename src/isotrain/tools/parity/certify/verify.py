"""Whether a certificate is as it was made, and about the runs that lie here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isotrain.errors import CertificateError, DataError
from isotrain.tools.parity.certify.certificate import Certificate, read_certificate
from isotrain.tools.parity.certify.issue import portable_recipe, side_of
from isotrain.tools.parity.read.bounded import sha256_of
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.run import RunLog

State = Literal["right", "wrong", "not checked"]
_SHOWN = 5


@dataclass(frozen=True)
class Verified:
    name: str
    state: State
    words: str


def verify(path: Path, runs: Mapping[str, Path] | None = None) -> list[Verified]:
    """Every check with its result; a certificate is consistent where nothing is `wrong`.

    That says nothing about who made it: `signing.signature_of` does. Anybody can write other figures and a
    digest that fits them, so nothing in the file is computed again.

    `runs` are directories by role: `reference` or `candidate`.
    """
    try:
        certificate = read_certificate(path)
    except DataError as error:
        return [Verified("digest", "wrong", str(error))]
    findings = [
        Verified("digest", "right", f"the file is as it was made ({certificate.digest[:8]})"),
        Verified("verdict", "not checked", "`isotrain parity compare` computes it again from both runs"),
    ]
    for role, directory in (runs or {}).items():
        findings += _run(certificate, role, directory)
    if not runs:
        findings.append(Verified("inputs", "not checked", "no directories of the runs were given"))
    return findings


def is_consistent(findings: Iterable[Verified]) -> bool:
    return all(finding.state != "wrong" for finding in findings)


def _run(certificate: Certificate, role: str, path: Path) -> Iterator[Verified]:
    """A run's files against the digests, its curves and its device against what is told of them."""
    prefix = f"{role}/"
    stated = {
        name.removeprefix(prefix): sha for name, sha in certificate.inputs.items() if name.startswith(prefix)
    }
    if not stated:
        yield Verified(f"inputs of {role}", "wrong", f"the certificate names no file of {role!r}")
        return
    try:
        run = read_run(path)
        directory = path if path.is_dir() else path.parent
        digests = {name: run.sha256.get(name) or sha256_of(directory, name) for name in stated}
        differ = [name for name, sha in stated.items() if digests[name] != sha]
    except DataError as error:
        yield Verified(f"inputs of {role}", "wrong", str(error))
        return
    shown = ", ".join(differ[:_SHOWN])
    right = f"{', '.join(list(stated)[:_SHOWN])} in {path}"
    yield _finding(f"inputs of {role}", not differ, right, f"{shown} in {path}: not the file that was read")
    other = list(_other_curves(certificate, role, run))
    right_curves = "are those of the run"
    yield _finding(
        f"curves of {role}", not other, right_curves, f"{', '.join(other[:_SHOWN])}: not those of {path}"
    )
    yield from _told(certificate, role, run)


def _other_curves(certificate: Certificate, role: str, run: RunLog) -> Iterator[str]:
    for metric, curve in certificate.curves.items():
        series = run.metrics.get(metric)
        pairs = zip(series.steps_S.tolist(), series.values_S.tolist(), strict=True) if series else ()
        there = dict(pairs)
        if [there.get(step) for step in curve.steps] != list(curve.of(role)):
            yield metric


def _told(certificate: Certificate, role: str, run: RunLog) -> Iterator[Verified]:
    """Device and recipe of a side."""
    side = certificate.sides[role]
    try:
        recorded = side_of(run)
        differ = [name for name, value in side if value != getattr(recorded, name)]
        if role == "reference" and portable_recipe(run) != certificate.recipe:
            differ.append("recipe")
    except CertificateError as error:
        yield Verified(f"device of {role}", "wrong", str(error))
        return
    yield _finding(f"device of {role}", not differ, "as told", f"told otherwise: {', '.join(differ)}")


def _finding(name: str, fits: bool, right: str, wrong: str) -> Verified:
    return Verified(name, "right", right) if fits else Verified(name, "wrong", wrong)
