"""Evidence that the levels leave for the report, read without trust: what has another form is left out."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from isotrain.language import tr
from isotrain.tools.parity.levels.level import Level
from isotrain.tools.parity.run import ROLES

OPERATOR_FIGURES = ("error", "cosine", "max_abs", "max_rel", "within_0.1%", "within_0.5%")
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class LayerErrors:
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
class OperatorRow:
    """One operator of level P0, each side against the exact result."""

    operator: str
    shapes: str = ""
    dtype: str = ""
    reference: dict[str, float | None] = field(default_factory=dict)
    candidate: dict[str, float | None] = field(default_factory=dict)
    ratio: float | None = None


@dataclass(frozen=True)
class Envelope:
    """Effect of harmless rounding on a metric in level P3, as differences from the reference."""

    steps: list[float]
    low: list[float]
    high: list[float]
    members: int


@dataclass(frozen=True)
class Table:
    columns: list[str]
    rows: list[list[Any]]


def layers(level: Level) -> list[LayerErrors]:
    """In order of execution."""
    return _each(LayerErrors, level.evidence.get("layers"))


def first_layer(level: Level) -> LayerErrors | None:
    """The first that differs, if it is among the layers."""
    first = level.evidence.get("first")
    key = [first.get(name) for name in ("step", "kind", "name")] if isinstance(first, dict) else []
    return next((layer for layer in layers(level) if [layer.step, layer.kind, layer.name] == key), None)


def operators(level: Level) -> list[OperatorRow]:
    """Those that the candidate rounds worst, beside the reference, first."""
    return sorted(_each(OperatorRow, level.evidence.get("operators")), key=lambda row: -_badness(row.ratio))


def one_sided_operators(level: Level) -> list[str]:
    """Calls that only one of the runs makes."""
    return [
        tr(
            "{operator} {shapes} (not in the {side})",
            operator=row.get("operator", "?"),
            shapes=row.get("shapes", ""),
            side=ROLES.get(str(row.get("missing in"))) or row.get("missing in", "other"),
        )
        for row in _each(dict[str, Any], level.evidence.get("missing"))
    ]


def without_oracle(level: Level) -> list[str]:
    """Operators that have no float64 to be compared with."""
    sides = _each(dict[str, list[str]], [level.evidence.get("no_oracle")])
    return list(dict.fromkeys(name for side in sides for names in side.values() for name in names))


def envelope(level: Level, metric: str) -> Envelope | None:
    metrics = level.evidence.get("envelope")
    envelopes = _each(Envelope, [metrics.get(metric)] if isinstance(metrics, dict) else [])
    return next(
        (
            envelope
            for envelope in envelopes
            if len(envelope.steps) == len(envelope.low) == len(envelope.high) > 0
        ),
        None,
    )


def table(level: Level) -> Table | None:
    return next(iter(_each(Table, [level.evidence.get("table")])), None)


def _each(kind: type[Kind], rows: object) -> list[Kind]:
    adapter, readable = TypeAdapter(kind), list[Kind]()
    for row in rows if isinstance(rows, list | tuple) else ():
        with suppress(ValidationError):
            readable.append(adapter.validate_python(row))
    return readable


def _badness(ratio: float | None) -> float:
    return -math.inf if ratio is None else math.inf if math.isnan(ratio) else ratio
