"""The levels that rest on curves alone, computed again from a certificate."""

from __future__ import annotations

from collections.abc import Iterator

from isotrain.parity.certificate import Certificate
from isotrain.parity.compare import SPEED
from isotrain.parity.envelope import envelope_level
from isotrain.parity.figures import comparison_of, run_of
from isotrain.parity.levels import Level, not_run
from isotrain.parity.paired import paired_level, tempered
from isotrain.parity.published import kind_of


def levels_again(certificate: Certificate) -> Iterator[Level]:
    """P2 and P3, where the certificate has them."""
    ran = {level.name for level in certificate.levels if level.state != "not run"}
    curves = certificate.curves
    envelope = not_run("P3")
    if "P3" in ran:
        roles = list(dict.fromkeys(role for curve in curves.values() for role in curve.envelope))
        reference, candidate = run_of(curves, "reference"), run_of(curves, "candidate")
        envelope = envelope_level(reference, candidate, [run_of(curves, role) for role in roles])
        yield envelope
    if "P2" in ran:
        rated = {m: c for m, c in curves.items() if kind_of(m) or m in SPEED}
        yield tempered(paired_level(comparison_of(rated)), envelope)
