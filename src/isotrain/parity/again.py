"""The levels that rest on curves alone, computed again from a certificate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from isotrain.parity.certificate import Certificate, Curve
from isotrain.parity.compare import SPEED
from isotrain.parity.envelope import envelope_level
from isotrain.parity.figures import comparison_of
from isotrain.parity.levels import Level, not_run
from isotrain.parity.paired import paired_level, tempered
from isotrain.parity.published import kind_of
from isotrain.parity.run import Run, Series


def levels_again(certificate: Certificate) -> Iterator[Level]:
    """P2 and P3, where the certificate has them."""
    ran = {level.name for level in certificate.levels if level.state != "not run"}
    curves = certificate.curves
    envelope = not_run("P3")
    if "P3" in ran:
        roles = list(dict.fromkeys(role for curve in curves.values() for role in curve.envelope))
        reference, candidate = _run(certificate, "reference"), _run(certificate, "candidate")
        envelope = envelope_level(reference, candidate, [_run(certificate, role) for role in roles])
        yield envelope
    if "P2" in ran:
        judged = {m: c for m, c in curves.items() if kind_of(m) or m in SPEED}
        yield tempered(paired_level(comparison_of(judged)), envelope)


def _run(certificate: Certificate, role: str) -> Run:
    held = {metric: _series(curve, role) for metric, curve in certificate.curves.items()}
    return Run(Path(role), "certificate", {metric: series for metric, series in held.items() if series})


def _series(curve: Curve, role: str) -> Series | None:
    values = curve.of(role)
    return None if values is None else Series(np.array(curve.steps, np.int64), np.array(values, np.float64))
