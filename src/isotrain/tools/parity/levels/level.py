"""The levels at which a computation is looked at, with what one of them has found about a pair of runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from isotrain.language import tr

State = Literal["same", "different", "cannot tell", "not run"]

# From the smallest part to the whole. Each asks a question that the one before cannot answer.
LEVELS = {
    "P0": (tr("operators"), tr("does each operator round as well as the reference's does?")),
    "P1": (
        tr("forced steps"),
        tr("same weights and data in, same activations, gradients and updates out?"),
    ),
    "P2": (tr("paired curves"), tr("same seed and data order, do the curves agree?")),
    "P3": (tr("envelope"), tr("is the difference larger than harmless rounding would cause?")),
}
"""Names and questions."""
STATES: dict[State, str] = {
    "same": tr("same"),
    "different": tr("different"),
    "cannot tell": tr("cannot tell"),
    "not run": tr("not run"),
}


@dataclass(frozen=True)
class Check:
    """One statistic beside its limit; `passed` is None where it decides nothing."""

    name: str
    value: float
    limit: float
    passed: bool | None
    note: str = ""


@dataclass(frozen=True)
class Level:
    name: str
    """A key of `LEVELS`."""
    state: State
    words: str
    """The finding in one plain sentence."""
    checks: tuple[Check, ...] = ()
    causes: tuple[str, ...] = ()
    """Where it is `different`: what may be behind it, most likely first."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Tables for the report, as JSON."""
    truth: str | None = None
    """The data type of a training step that was held against float64."""


def not_run(name: str, why: str = tr("was not run")) -> Level:
    return Level(name, "not run", why)
