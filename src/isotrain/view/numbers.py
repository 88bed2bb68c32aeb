"""Numbers as JSON has them."""

from __future__ import annotations

import math
from typing import Any


def finite_or_word(value: float | None) -> float | str | None:
    """JSON has no word for NaN and infinities: they become strings, as in `metrics.jsonl`."""
    return value if value is None or math.isfinite(value) else str(value)


def runs_of(values: list[Any]) -> list[list[Any]]:
    """Equal neighbours as `[value, how many]`: masks and versions change seldom."""
    found: list[list[Any]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found
