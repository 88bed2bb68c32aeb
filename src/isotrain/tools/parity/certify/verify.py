"""Whether a certificate is consistent, in itself and with the runs that it is about."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isotrain.errors import CertificateError, DataError
from isotrain.tools.parity.certify.certificate import (
    Certificate,
    LevelFound,
    OutcomeFound,
    digest_of,
    read_certificate,
)
from isotrain.tools.parity.certify.issue import (
    comparison_of,
    figures_of,
    outcome_again,
    outcome_found,
    portable_recipe,
    side_of,
)
from isotrain.tools.parity.compare.effects import ALONE
from isotrain.tools.parity.levels.level import Level
from isotrain.tools.parity.read.bounded import sha256_of
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.run import RunLog
from isotrain.tools.parity.verdict import judge

State = Literal["right", "wrong", "not checked"]
# Another processor may sum a correlation in another order; a changed figure is further off than this.
_CLOSE = 1e-9
_SHOWN = 5


@dataclass(frozen=True)
class Verified:
    name: str
    state: State
    words: str


def verify(path: Path, runs: Mapping[str, Path] | None = None) -> list[Verified]:
    """Every check with its result; a certificate is consistent where nothing is `wrong`.

    That says nothing about who made it: `signing.signature_of` does. Levels rest on traces and further runs
    that are not in the file.

    `runs` are directories by role: `reference` or `candidate`.
    """
    try:
        certificate = read_certificate(path)
    except DataError as error:
        return [Verified("digest", "wrong", str(error))]
    findings = [Verified("digest", "right", f"the file is as it was made ({certificate.digest[:8]})")]
    findings += _itself(certificate)
    for role, directory in (runs or {}).items():
        findings += _run(certificate, role, directory)
    if not runs:
        findings.append(Verified("inputs", "not checked", "no directories of the runs were given"))
    return findings


def is_consistent(findings: Iterable[Verified]) -> bool:
    return all(finding.state != "wrong" for finding in findings)


def _itself(certificate: Certificate) -> Iterator[Verified]:
    """Checks of the file alone: a digest can be made anew by anybody who changes a number."""
    fits = digest_of(certificate.recipe) == certificate.recipe_sha256
    yield _finding("recipe", fits, "its SHA-256 fits", "recipe_sha256 is not that of the recipe")
    try:
        comparison = comparison_of(certificate.curves)
        stated = certificate.figures
        figures = figures_of(comparison, stated.loss_metric, stated.reward_metric)
    except DataError as error:
        yield Verified("figures", "wrong", str(error))
        return
    differ = [
        f"{name} is stated as {value!r}, the curves give {getattr(figures, name)!r}"
        for name, value in stated
        if value != getattr(figures, name)
    ]
    yield _finding("figures", not differ, f"the curves give them: {stated.steps} steps", "; ".join(differ))
    broken = list(_contradictions(certificate.levels))
    yield _finding("levels", not broken, "each fits its checks", "; ".join(broken))
    outcome = outcome_again(certificate)
    yield _outcome(certificate, outcome_found(outcome))
    levels = [Level(level.name, level.state, level.words, truth=level.truth) for level in certificate.levels]
    computation = judge(comparison, outcome, levels).computation.verdict
    said = f"the levels say {computation!r}"
    fits = computation == certificate.computation
    yield _finding("computation", fits, said, f"is {certificate.computation!r}, {said}")


def _outcome(certificate: Certificate, again: OutcomeFound) -> Verified:
    stated = certificate.outcome
    if any(effect.evidence != ALONE for effect in stated.effects):
        return _outcome_of_more_runs(stated, again)
    # What keeps whole runs from being equivalent, such as an early end, may lie outside of the file.
    cautious = (stated.verdict, again.verdict) == ("inconclusive", "equivalent")
    fits = (cautious or stated.verdict == again.verdict) and len(stated.effects) == len(again.effects)
    for a, b in zip(stated.effects, again.effects, strict=False):
        fits &= (a.metric, a.verdict, a.margin) == (b.metric, b.verdict, b.margin)
        fits &= _close(a.difference, b.difference) and _close(a.low, b.low) and _close(a.high, b.high)
    words = f"the curves give {again.verdict!r}"
    return _finding("outcome", fits, words, f"is {stated.verdict!r} there; {words}, with other figures")


def _outcome_of_more_runs(stated: OutcomeFound, again: OutcomeFound) -> Verified:
    """Further runs are not in the file: only what contradicts itself is found."""
    margins = {effect.metric: effect.margin for effect in again.effects}
    fits = margins == {effect.metric: effect.margin for effect in stated.effects if effect.metric in margins}
    for effect in (effect for effect in stated.effects if effect.verdict == "equivalent"):
        low, high = (-math.inf if effect.low is None else effect.low), effect.high
        fits &= high is not None and -effect.margin <= low and high <= effect.margin
    verdicts = {effect.verdict for effect in stated.effects}
    fits &= stated.verdict != "equivalent" or ("equivalent" in verdicts and "different" not in verdicts)
    words = "it was estimated from further runs, which are not in the file"
    if fits:
        return Verified("outcome", "not checked", words)
    return Verified("outcome", "wrong", f"{words}; it contradicts itself, or leaves a metric out")


def _contradictions(levels: Iterable[LevelFound]) -> Iterator[str]:
    for level in levels:
        failed = [check.name for check in level.checks if check.passed is False]
        if level.state == "same" and failed:
            yield f"{level.name} is 'same', but did not pass {', '.join(failed[:_SHOWN])}"
        if level.state == "not run" and level.checks:
            yield f"{level.name} was not run, but has checks"


def _close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=_CLOSE, abs_tol=1e-12)


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
