"""Each statistic of two curves, as it is told to people."""

from __future__ import annotations

import math
from collections.abc import Callable

from isotrain.language import tr
from isotrain.parity.statistics import Apart, Interval


def number(value: float | None) -> str:
    """Three digits; `-` for what is not known."""
    if value is None:
        return "-"
    if math.isfinite(value):
        return f"{value:.3g}"
    return tr("not a number") if math.isnan(value) else tr("infinite")


def interval(one: Interval | None) -> str:
    return "-" if one is None else tr("{low} to {high}", low=number(one.low), high=number(one.high))


EFFECT_COLUMNS = (
    tr("window"),
    tr("reference"),
    tr("candidate"),
    tr("difference"),
    tr("95 % interval"),
    tr("margin"),
)
STATISTICS: tuple[tuple[str, Callable[[Apart], str]], ...] = (
    (tr("steps compared"), lambda a: f"{a.steps:,}"),
    (tr("mean absolute error, in hundredths"), lambda a: number(100 * a.mean_absolute)),
    (tr("mean relative error, in %"), lambda a: number(a.mean_relative and 100 * a.mean_relative)),
    (tr("first step"), lambda a: number(a.first)),
    (tr("largest (at step)"), lambda a: f"{number(a.largest)} ({a.largest_at})"),
    (tr("signed mean"), lambda a: number(a.signed_mean)),
    (tr("its 95 % interval"), lambda a: interval(a.signed_interval)),
    (tr("the curves part at step"), lambda a: "-" if a.parts_at is None else str(a.parts_at)),
    (
        tr("correlation of changes"),
        lambda a: "-" if a.change_correlation is None else f"{a.change_correlation:.4f}",
    ),
    (tr("share of a flat line's error"), lambda a: number(a.share_of_flat)),
)
