"""Which levels an amount of time can pay for, and how much power that buys."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from isotrain.errors import RecipeError
from isotrain.parity.envelope import FEWEST_MEMBERS, LIMIT
from isotrain.parity.equivalence import FEWEST_SEEDS, MARGIN, quantile

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
            lines.append(
                f"P3: {self.members} members; the envelope's width is known to {100 * blur:.0f} %, and a "
                f"lasting difference of {LIMIT:g} widths is found"
            )
        else:
            lines.append("P3: no envelope; curves alone miss small mistakes (see the power table)")
        if self.seeds:
            seeds = self.seeds + 1  # the pair that is compared counts as well
            spread = MARGIN * math.sqrt(seeds) / (quantile(seeds) + 1.28)
            lines.append(
                f"P4, P5: {seeds} seeds; can be decided where a pair of runs differs by less than about "
                f"{spread:.1f} of what a seed changes"
            )
        else:
            lines.append("P4, P5: no seeds")
        return lines


def plan(left: float, reference_seconds: float, candidate_seconds: float, *, envelope: bool = True) -> Plan:
    """The envelope first: it decides about single runs, with a quarter of the runs that seeds take."""
    members = min(MOST_MEMBERS, int(left / reference_seconds)) if envelope else 0
    if members < FEWEST_MEMBERS:
        members = 0
    left -= members * reference_seconds
    pair = reference_seconds + candidate_seconds
    seeds = min(MOST_SEEDS, int(left / pair))
    if seeds + 1 < FEWEST_SEEDS:
        seeds = 0
    return Plan(members, seeds, members * reference_seconds + seeds * pair)
