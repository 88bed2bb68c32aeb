"""One finding about a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    id: str
    level: Level
    """`error`: training fails or is wrong; `warning`: it may; `note`: good to know."""
    problem: str
    remedy: str


def milder(level: Level) -> Level:
    """The next level below."""
    return LEVELS[min(LEVELS.index(level) + 1, len(LEVELS) - 1)]
