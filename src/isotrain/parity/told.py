"""Each statistic of two curves, as it is told to people."""

from __future__ import annotations

import math
from collections.abc import Callable

from isotrain.parity.statistics import Apart


def number(value: float | None) -> str:
    """Three digits; `-` for what is not known."""
    if value is None:
        return "-"
    return f"{value:.3g}" if math.isfinite(value) else "not a number" if math.isnan(value) else "infinite"


STATISTICS: tuple[tuple[str, Callable[[Apart], str]], ...] = (
    ("steps compared", lambda a: f"{a.steps:,}"),
    ("mean absolute error, in hundredths", lambda a: number(100 * a.mean_absolute)),
    ("mean relative error, in %", lambda a: number(a.mean_relative and 100 * a.mean_relative)),
    ("first step", lambda a: number(a.first)),
    ("largest (at step)", lambda a: f"{number(a.largest)} ({a.largest_at})"),
    ("signed mean", lambda a: number(a.signed_mean)),
    ("its 95 % interval", lambda a: f"{number(a.signed_interval.low)} to {number(a.signed_interval.high)}"),
    ("the curves part at step", lambda a: "-" if a.parts_at is None else str(a.parts_at)),
    (
        "correlation of changes",
        lambda a: "-" if a.change_correlation is None else f"{a.change_correlation:.4f}",
    ),
    ("share of a flat line's error", lambda a: number(a.share_of_flat)),
)
