"""Would the test have caught a real bug: what it said of runs whose truth is known."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from isotrain.errors import DataError
from isotrain.parity.statistics import Interval

_Z_95 = 1.959963984540054  # of the normal distribution, two-sided
_PACKAGED = "power.json"


@dataclass(frozen=True)
class PowerRow:
    """One pair of runs whose truth is known, and what was said of it."""

    name: str
    kind: Literal["mutation", "honest"]
    """A run with a bug put in on purpose, or a pair that differs by nothing but rounding."""
    algorithm: str
    verdict: Literal["same", "different", "cannot tell"]
    caught_by: str | None
    """The first level that told the runs apart."""
    published: bool
    """Whether the published rules hold, which call the pair the same then."""

    @property
    def right(self) -> bool:
        """Whether the verdict is the truth; `cannot tell` never is, so that doubt cannot pass for power."""
        return self.verdict == ("different" if self.kind == "mutation" else "same")


@dataclass(frozen=True)
class Power:
    protocol: str
    """What the pairs were and how they were run, in a sentence."""
    date: str
    rows: tuple[PowerRow, ...]

    @property
    def mutations(self) -> tuple[PowerRow, ...]:
        return tuple(row for row in self.rows if row.kind == "mutation")

    @property
    def honest(self) -> tuple[PowerRow, ...]:
        return tuple(row for row in self.rows if row.kind == "honest")

    @property
    def caught(self) -> int:
        return sum(row.right for row in self.mutations)

    @property
    def accepted(self) -> int:
        return sum(row.right for row in self.honest)

    @property
    def caught_by_published(self) -> int:
        """Mutations that the published rules reject as well."""
        return sum(not row.published for row in self.mutations)

    @property
    def miss_rate(self) -> Interval | None:
        """The 95 % interval of the share of mutations that are not caught; None where none was tried."""
        return wilson(len(self.mutations) - self.caught, len(self.mutations))

    @property
    def false_alarm_rate(self) -> Interval | None:
        """The same of honest pairs that are not accepted."""
        return wilson(len(self.honest) - self.accepted, len(self.honest))

    def as_json(self) -> dict[str, Any]:
        return {
            "protocol": self.protocol,
            "date": self.date,
            "mutations": len(self.mutations),
            "caught": self.caught,
            "caught_by_published_rules": self.caught_by_published,
            "honest": len(self.honest),
            "accepted": self.accepted,
            "miss_rate_95": asdict(self.miss_rate) if self.miss_rate else None,
            "false_alarm_rate_95": asdict(self.false_alarm_rate) if self.false_alarm_rate else None,
            "rows": [asdict(row) for row in self.rows],
        }


def wilson(count: int, total: int) -> Interval | None:
    """The 95 % interval of a share, by Wilson's score: honest for few trials and for shares of 0 and 1."""
    assert 0 <= count <= total
    if not total:
        return None
    share, square = count / total, _Z_95**2
    centre = (share + square / (2 * total)) / (1 + square / total)
    half = _Z_95 / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    # At the ends the formula gives 0 and 1 but for rounding.
    low = 0.0 if count == 0 else centre - half
    return Interval(low, 1.0 if count == total else centre + half)


def load_power(path: Path | None = None) -> Power | None:
    """The table that this version was published with, or that of a file; None where there is none."""
    source = files("isotrain.parity").joinpath(_PACKAGED) if path is None else path
    try:
        text = source.read_bytes()
    except FileNotFoundError:
        return None
    try:
        # Counts and intervals that were written beside the rows are computed again.
        return TypeAdapter(Power).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"{source}: not a power table: {where}: {first['msg']}; make it again") from error
