"""A figure that somebody measured beside what the simulator gives for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")

FITTED, HELD_OUT, UNFITTED = "fitted", "held out", "no fit"


@dataclass(frozen=True)
class Figure:
    case: str
    what: str
    source: str
    """Where the figure comes from: `here` was measured in this project, everything else published."""
    target: float
    simulated: float
    kind: str
    """`fitted`: a parameter was chosen so that it agrees, so it shows nothing. `held out`: parameters were
    fitted to other figures of the case. `no fit`: no parameter of the case was fitted to any figure."""
    inputs: str

    @property
    def error(self) -> float:
        return self.simulated / self.target - 1.0

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "simulated": round(self.simulated, 3), "error": round(self.error, 3)}


def table(figures: Iterable[Figure]) -> str:
    """In Markdown, as docs/scale.md has it."""
    lines = ["| case | figure | target | simulated | error | |", "|---|---|---|---|---|---|"]
    for figure in figures:
        lines.append(
            f"| {figure.case} | {figure.what} | {figure.target:.3g} | {figure.simulated:.3g} "
            f"| {figure.error:+.0%} | {figure.kind} |"
        )
    return "\n".join(lines)


def fit(simulated: Callable[[float], float], target: float, low: float, high: float) -> float:
    """The parameter between `low` and `high` at which a growing function gives the target."""
    for _ in range(16):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if simulated(middle) < target else (low, middle)
    return math.sqrt(low * high)


def swap(run: T, **changes: Any) -> T:
    """`dataclasses.replace`, also of nested settings: `swap(run, engines__count=2)`."""
    flat = {name: value for name, value in changes.items() if "__" not in name}
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        if inner:
            flat[outer] = swap(flat.get(outer, getattr(run, outer)), **{inner: value})
    settings: Any = run
    changed: T = replace(settings, **flat)
    return changed
