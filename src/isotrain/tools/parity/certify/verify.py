"""Whether a certificate is consistent, in itself and with the runs that it is about."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isotrain.errors import CertificateError, DataError
from isotrain.tools.parity.certify.certificate import (
    Certificate,
    CheckFound,
    EffectFound,
    LevelFound,
    OutcomeFound,
    digest_of,
    read_certificate,
)
from isotrain.tools.parity.certify.issue import (
    comparison_of,
    figures_of,
    level_found,
    outcome_again,
    outcome_found,
    portable_recipe,
    side_of,
)
from isotrain.tools.parity.compare.effects import ALONE, farthest_pair
from isotrain.tools.parity.levels.level import Level
from isotrain.tools.parity.read.bounded import sha256_of
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.run import RunLog
from isotrain.tools.parity.verdict import judge

State = Literal["right", "wrong", "not checked"]
Again = Callable[[Certificate], Iterable[Level]]
# Another processor may sum a correlation in another order; a changed figure is further off than this.
_CLOSE = 1e-9
_SHOWN = 5


@dataclass(frozen=True)
class Verified:
    name: str
    state: State
    words: str


def verify(path: Path, runs: Mapping[str, Path] | None = None, again: Again | None = None) -> list[Verified]:
    """Every check with its result; a certificate is consistent where nothing is `wrong`.

    That says nothing about who made it: `signing.signature_of` does.

    `runs` are directories by role: `reference`, `candidate`, or a member of the envelope. `again` computes
    levels anew from the certificate's curves.
    """
    try:
        certificate = read_certificate(path)
    except DataError as error:
        return [Verified("digest", "wrong", str(error))]
    findings = [Verified("digest", "right", f"the file is as it was made ({certificate.digest[:8]})")]
    findings += _itself(certificate)
    findings += _again(certificate, again(certificate) if again else ())
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
    levels = [Level(level.name, level.state, level.words) for level in certificate.levels]
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
    """Effects over other seeds rest on runs that are not in the file; the two runs in it are among them."""
    alone = {effect.metric: effect for effect in again.effects}
    wrong = []
    if missing := sorted(set(alone) - {effect.metric for effect in stated.effects}):
        wrong.append(f"says nothing of {missing[0]}")
    for effect in stated.effects:
        curve = alone.get(effect.metric)
        if curve is not None and effect.margin != curve.margin:
            wrong.append(f"{effect.metric}: the margin is {curve.margin:g}, not {effect.margin:g}")
        if effect.low is None or effect.high is None:
            if effect.evidence != ALONE or (
                curve is not None and not _close(effect.difference, curve.difference)
            ):
                wrong.append(f"{effect.metric}: no interval, and not the difference of the curves")
            continue
        within = -effect.margin <= effect.low and effect.high <= effect.margin
        if effect.verdict == "equivalent" and not within:
            wrong.append(f"{effect.metric} is 'equivalent', but its interval is not within the margin")
        if curve is not None and not _may_be_among(effect, curve):
            wrong.append(
                f"{effect.metric}: a difference of {effect.difference:g} from {effect.evidence!r}, but the "
                f"two runs in the file differ by {curve.difference:g}, which cannot be among them"
            )
    verdicts = {effect.verdict for effect in stated.effects}
    if stated.verdict == "equivalent" and ("different" in verdicts or "equivalent" not in verdicts):
        wrong.append("is 'equivalent', its metrics are not")
    if wrong:
        return Verified("outcome", "wrong", "; ".join(wrong[:_SHOWN]))
    return Verified("outcome", "not checked", "it was estimated from further runs, which are not in the file")


def _may_be_among(effect: EffectFound, curve: EffectFound) -> bool:
    """Whether the difference of the two runs in the file can be one of those that gave the interval."""
    assert effect.low is not None and effect.high is not None
    if effect.evidence == ALONE:
        same = (
            effect.verdict == curve.verdict,
            _close(effect.low, curve.low),
            _close(effect.high, curve.high),
        )
        return all(same) and _close(effect.difference, curve.difference)
    farthest = farthest_pair(effect.evidence, (effect.high - effect.low) / 2)
    if farthest is None or not _close(effect.difference, (effect.low + effect.high) / 2):
        return False
    return abs(curve.difference - effect.difference) <= farthest * (1 + 1e-6) + 1e-9 * abs(curve.difference)


def _contradictions(levels: Iterable[LevelFound]) -> Iterator[str]:
    for level in levels:
        failed = [check.name for check in level.checks if check.passed is False]
        if level.state == "same" and failed:
            yield f"{level.name} is 'same', but did not pass {', '.join(failed[:_SHOWN])}"
        if level.state == "not run" and level.checks:
            yield f"{level.name} was not run, but has checks"


def _again(certificate: Certificate, levels: Iterable[Level]) -> Iterator[Verified]:
    stated = {level.name: level for level in certificate.levels}
    try:
        recomputed = [level_found(level) for level in levels]
    except DataError as error:
        yield Verified("levels again", "wrong", f"the curves do not give them: {error}")
        return
    for level in recomputed:
        before = stated[level.name]
        differ = before.state != level.state or not _same_checks(before.checks, level.checks)
        words = f"the curves give {level.state!r}: {level.words}"
        yield _finding(f"{level.name} again", not differ, words, f"is {before.state!r} there; {words}")


def _same_checks(before: tuple[CheckFound, ...], now: tuple[CheckFound, ...]) -> bool:
    return len(before) == len(now) and all(
        (a.name, a.passed) == (b.name, b.passed) and _close(a.value, b.value) and _close(a.limit, b.limit)
        for a, b in zip(before, now, strict=True)
    )


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
        values = curve.of(role)
        if values is None:
            continue
        series = run.metrics.get(metric)
        pairs = zip(series.steps_S.tolist(), series.values_S.tolist(), strict=True) if series else ()
        there = dict(pairs)
        if [there.get(step) for step in curve.steps] != list(values):
            yield metric


def _told(certificate: Certificate, role: str, run: RunLog) -> Iterator[Verified]:
    """Device and recipe of the two sides; of a member of the envelope nothing is told."""
    if role not in certificate.sides:
        return
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
