"""The figures and levels of a certificate, computed again from its curves alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from isotrain.errors import DataError
from isotrain.parity.certificate import Certificate, Curve, Figures
from isotrain.parity.compare import SPEED, Comparison, compare
from isotrain.parity.envelope import envelope_level
from isotrain.parity.levels import Level
from isotrain.parity.outcome import Outcome, outcome_of
from isotrain.parity.paired import paired_level
from isotrain.parity.published import Kind, kind_of
from isotrain.parity.run import Run, Series


def comparison_of(curves: Mapping[str, Curve]) -> Comparison:
    """Reference against candidate, as if their runs had been read."""
    with np.errstate(all="ignore"):  # what overflows is refused where it would become a figure
        return compare(
            run_of(curves, "reference"),
            run_of(curves, "candidate"),
            [metric for metric in curves if metric not in SPEED],
        )


def first_of(kind: Kind, metrics: Iterable[str]) -> str | None:
    """The metric that stands for a kind: a policy's loss before a critic's, then as runs record them."""
    found = [metric for metric in metrics if kind_of(metric) == kind]
    of_policy = [metric for metric in found if metric.endswith(("pg_loss", "policy_loss"))]
    return next(iter(of_policy or found), None)


def figures_of(comparison: Comparison, loss_metric: str | None, reward_metric: str | None) -> Figures:
    """The names are given, because the order of a file's fields is not a fact that a digest covers."""
    for kind, metric in (("loss", loss_metric), ("reward", reward_metric)):
        known = [name for name in comparison.curves if kind_of(name) == kind]
        if metric not in known and (known or metric is not None):
            raise DataError(f"the figure of the {kind} is of {metric!r}, the curves have {known or 'none'}")
    curves = comparison.curves
    loss = curves[loss_metric] if loss_metric is not None else None
    reward = curves[reward_metric] if reward_metric is not None else None
    speeds = list(comparison.speed.values())
    return Figures(
        steps=max(one.steps for one in curves.values()),
        loss_metric=loss_metric,
        loss_error=_hundredths(loss.mean_absolute) if loss else None,
        loss_relative=_hundredths(loss.mean_relative) if loss and loss.mean_relative is not None else None,
        reward_metric=reward_metric,
        reward_error=_hundredths(reward.mean_absolute) if reward else None,
        throughput_ratio=_finite(speeds[-1].ratio) if speeds else None,
    )


def _hundredths(value: float) -> float:
    return _finite(100 * value)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise DataError("the curves are so far apart that there is no figure for it")
    return value


def run_of(curves: Mapping[str, Curve], role: str) -> Run:
    """What a certificate has of one run, as if it had been read; metrics without its values are left out."""
    held = {metric: (curve.steps, curve.of(role)) for metric, curve in curves.items()}
    metrics = {
        metric: Series(np.array(steps, np.int64), np.array(values, np.float64))
        for metric, (steps, values) in held.items()
        if values is not None
    }
    return Run(Path(role), "certificate", metrics)


def levels_again(certificate: Certificate) -> Iterator[Level]:
    """P2 and P3, where the certificate has them."""
    ran = {level.name for level in certificate.levels if level.state != "not run"}
    curves = certificate.curves
    roles = list(dict.fromkeys(role for curve in curves.values() for role in curve.envelope))
    members = [run_of(curves, role) for role in roles]
    if "P2" in ran:
        rated = {m: c for m, c in curves.items() if kind_of(m) or m in SPEED}
        yield paired_level(comparison_of(rated), members)
    if "P3" in ran:
        reference, candidate = run_of(curves, "reference"), run_of(curves, "candidate")
        yield envelope_level(reference, candidate, members)


def outcome_again(certificate: Certificate) -> Outcome:
    """From the curves of the two runs; those of other seeds are not in a certificate."""
    rated = {m: c for m, c in certificate.curves.items() if kind_of(m) or m in SPEED}
    free = certificate.subject.kind == "free-running"
    return outcome_of(comparison_of(rated), "free-running" if free else "paired")
