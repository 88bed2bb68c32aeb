"""Evidence of the levels, as the report shows it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from isotrain.language import tr
from isotrain.tools.parity.levels.level import Level
from isotrain.tools.parity.run import ROLES


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
class Envelope:
    """Effect of harmless rounding on a metric in level P3, as differences from the reference."""

    steps: list[float]
    low: list[float]
    high: list[float]
    members: int


def layers(level: Level) -> list[LayerErrors]:
    """In order of execution."""
    rows = level.evidence.get("layers", ())
    return [LayerErrors(row["step"], row["kind"], row["name"], row["error"], row["limit"]) for row in rows]


def first_layer(level: Level) -> LayerErrors | None:
    """The first that differs, if it is among the layers."""
    first = level.evidence.get("first") or {}
    key = [first.get(name) for name in ("step", "kind", "name")]
    return next((layer for layer in layers(level) if [layer.step, layer.kind, layer.name] == key), None)


def operators(level: Level) -> list[dict[str, Any]]:
    """Those that the candidate rounds worst, beside the reference, first."""
    return sorted(level.evidence.get("operators", ()), key=lambda row: -row["ratio"])


def one_sided_operators(level: Level) -> list[str]:
    """Calls that only one of the runs makes."""
    return [
        tr(
            "{operator} {shapes} (not in the {side})",
            operator=row["operator"],
            shapes=row["shapes"],
            side=ROLES[row["missing in"]],
        )
        for row in level.evidence.get("missing", ())
    ]


def without_oracle(level: Level) -> list[str]:
    """Operators that have no float64 to be compared with."""
    sides = level.evidence.get("no_oracle", {})
    return list(dict.fromkeys(name for names in sides.values() for name in names))


def envelope(level: Level, metric: str) -> Envelope | None:
    drawn = level.evidence.get("envelope", {}).get(metric)
    return None if drawn is None else Envelope(**drawn)
