"""What the levels leave for the report, read without trust: what has another form is left out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from isotrain.observe.metrics import NON_FINITE
from isotrain.parity.levels import Level
from isotrain.parity.run import Numbers

OPERATOR_FIGURES = ("error", "cosine", "max_abs", "max_rel", "within_0.1%", "within_0.5%")


@dataclass(frozen=True)
class Layer:
    """One comparison of level P1."""

    step: int
    kind: str
    name: str
    error: float
    limit: float

    @property
    def decades(self) -> float:
        """Powers of ten above the limit; below it, negative. What is not a number is as far off as can be."""
        if not math.isfinite(self.error) or self.limit <= 0 < self.error:
            return math.inf
        return math.log10(self.error / self.limit) if self.error > 0 else -math.inf


@dataclass(frozen=True)
class Operator:
    """One operator of level P0, each side against the exact result."""

    name: str
    shapes: str
    dtype: str
    reference: dict[str, float | None]
    candidate: dict[str, float | None]
    ratio: float | None


@dataclass(frozen=True)
class Envelope:
    """What harmless rounding did to a metric in level P3, as differences from the reference."""

    steps_S: Numbers
    low_S: Numbers
    high_S: Numbers
    members: int


@dataclass(frozen=True)
class Table:
    columns: list[str]
    rows: list[list[Any]]


def layers(level: Level) -> list[Layer]:
    """In order of execution."""
    return list(_layers(level))


def first_layer(level: Level) -> Layer | None:
    """The first that differs, if it is among the layers."""
    first = level.evidence.get("first")
    if not isinstance(first, dict):
        return None
    key = (first.get("step"), first.get("kind"), first.get("name"))
    return next((one for one in layers(level) if (one.step, one.kind, one.name) == key), None)


def operators(level: Level) -> list[Operator]:
    """Those that the candidate rounds worst, beside the reference, first."""
    found = [
        Operator(
            str(row.get("operator", "?")),
            str(row.get("shapes", "")),
            str(row.get("dtype", "")),
            _figures(row.get("reference")),
            _figures(row.get("candidate")),
            number_of(row.get("ratio")),
        )
        for row in _objects(level.evidence.get("operators"))
    ]
    return sorted(found, key=lambda one: -_badness(one.ratio))


def one_sided_operators(level: Level) -> list[str]:
    """Calls that only one of the runs makes."""
    return [
        f"{row.get('operator', '?')} {row.get('shapes', '')} (not in the {row.get('missing in', 'other')})"
        for row in _objects(level.evidence.get("missing"))
    ]


def without_oracle(level: Level) -> list[str]:
    """Operators that have no float64 to be compared with."""
    sides = level.evidence.get("no_oracle")
    names = [name for own in sides.values() for name in own] if isinstance(sides, dict) else []
    return list(dict.fromkeys(map(str, names)))


def envelope(level: Level, metric: str) -> Envelope | None:
    metrics = level.evidence.get("envelope")
    found = metrics.get(metric) if isinstance(metrics, dict) else None
    if not isinstance(found, dict):
        return None
    try:
        steps_S, low_S, high_S = (
            np.asarray(found[key], dtype=np.float64) for key in ("steps", "low", "high")
        )
    except (KeyError, TypeError, ValueError):
        return None
    if steps_S.ndim != 1 or not len(steps_S) or not steps_S.shape == low_S.shape == high_S.shape:
        return None
    members = found.get("members")
    return Envelope(steps_S, low_S, high_S, members if isinstance(members, int) else 0)


def table(level: Level) -> Table | None:
    found = level.evidence.get("table")
    if not isinstance(found, dict) or not isinstance(found.get("columns"), list | tuple):
        return None
    rows = found.get("rows")
    kept = (
        [list(row) for row in rows if isinstance(row, list | tuple)] if isinstance(rows, list | tuple) else []
    )
    return Table([str(column) for column in found["columns"]], kept)


def number_of(value: object) -> float | None:
    if isinstance(value, str):
        return NON_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def _layers(level: Level) -> Iterator[Layer]:
    for row in _objects(level.evidence.get("layers")):
        step, error, limit = row.get("step"), row.get("error"), number_of(row.get("limit"))
        if isinstance(step, int) and limit is not None and "name" in row:
            # An error that was not written as a number was none.
            size = number_of(error)
            kind, name = str(row.get("kind", "layer")), str(row["name"])
            yield Layer(step, kind, name, math.nan if size is None else size, limit)


def _objects(rows: object) -> list[dict[str, Any]]:
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list | tuple) else []


def _figures(found: object) -> dict[str, float | None]:
    values = found if isinstance(found, dict) else {}
    return {name: number_of(values.get(name)) for name in OPERATOR_FIGURES}


def _badness(ratio: float | None) -> float:
    return -math.inf if ratio is None else math.inf if math.isnan(ratio) else ratio
