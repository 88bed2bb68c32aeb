"""Which levels an amount of time can pay for, and how much power that buys."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from isotrain.errors import RecipeError
from isotrain.parity.thresholds import FEWEST_MEMBERS, FEWEST_RUNS

MOST_MEMBERS, MOST_SEEDS = 8, 10
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(text: str) -> float:
    """`90s`, `30m` or `2h`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if found is None:
        raise RecipeError(f"--budget {text!r}: write a number with s, m or h, such as 30m")
    return float(found.group(1)) * _UNITS[found.group(2)]


@dataclass(frozen=True)
class Plan:
    members: int
    """Runs of the reference for its envelope; 0 where there is no time for one."""
    seeds: int
    """Further pairs of runs; 0 likewise."""
    seconds: float

    def words(self) -> list[str]:
        """What will be run, and what that can show."""
        lines = []
        if self.members:
            blur = 1 / math.sqrt(2 * self.members)
            lines.append(f"P3: {self.members} members; the envelope's width is known to {100 * blur:.0f} %")
        else:
            lines.append("P3: no envelope; curves alone can rarely show that a computation is the same")
        if self.seeds:
            # The pair that is compared counts as well.
            lines.append(f"outcome: over {self.seeds + 1} seeds, with their spread")
        else:
            lines.append("outcome: one run a side, without the spread between seeds")
        return lines


def plan(left: float, reference_seconds: float, candidate_seconds: float, *, envelope: bool = True) -> Plan:
    """The envelope first: it decides about single runs, with a quarter of the runs that seeds take."""
    members = min(MOST_MEMBERS, int(left / reference_seconds)) if envelope else 0
    if members < FEWEST_MEMBERS:
        members = 0
    left -= members * reference_seconds
    pair = reference_seconds + candidate_seconds
    seeds = min(MOST_SEEDS, int(left / pair))
    if seeds + 1 < FEWEST_RUNS:
        seeds = 0
    return Plan(members, seeds, members * reference_seconds + seeds * pair)
