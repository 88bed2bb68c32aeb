"""Seconds of a weight sync as a line over bytes, through two measurements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    fixed: float
    gb_per_second: float

    def seconds(self, gigabytes: float) -> float:
        return self.fixed + gigabytes / self.gb_per_second


def line_through(first: tuple[float, float], second: tuple[float, float]) -> Transfer:
    """Of two pairs of gigabytes and seconds."""
    (gb_1, seconds_1), (gb_2, seconds_2) = first, second
    per_gb = (seconds_2 - seconds_1) / (gb_2 - gb_1)
    if per_gb <= 0:
        raise ValueError("the larger transfer must take longer")
    return Transfer(seconds_1 - per_gb * gb_1, 1.0 / per_gb)
