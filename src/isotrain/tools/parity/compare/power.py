"""Would the test have shown a real bug: what it said of runs whose truth is known, by kind of evidence."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from isotrain.errors import DataError
from isotrain.language import tr
from isotrain.tools.parity.compare.effects import ALONE
from isotrain.tools.parity.compare.statistics import Interval
from isotrain.tools.parity.run import section
from isotrain.tools.parity.verdict import Same, Verdict

_Z_95 = 1.959963984540054  # of the normal distribution, two-sided
_PACKAGED = "power.json"

Evidence = Literal["logs", "reruns", "probes", "probes+reruns", "replay", "sampler", "dumps"]
EVIDENCE: dict[Evidence, str] = {
    "logs": tr("logs alone"),
    "reruns": tr("logs with reruns of the reference"),
    "probes": tr("probes of layers or operators"),
    "probes+reruns": tr("probes and reruns of the reference"),
    "replay": tr("probes in a replay of recorded responses"),
    "sampler": tr("drawn tokens"),
    "dumps": tr("statistics of dumped steps"),
}


def evidence_of(verdict: Verdict) -> Evidence:
    """The strongest that the verdict had."""
    comparison = verdict.comparison
    if any(
        section(run.recipe, "rollout").get("replay") for run in (comparison.reference, comparison.candidate)
    ):
        return "replay"
    ran = {level.name for level in verdict.computation.levels if level.state != "not run"}
    if any(level.evidence.get("dump") for level in verdict.computation.levels):
        return "dumps"
    # Of runs that sampled, reruns tell about the outcome, and no envelope is made of them.
    rerun = "P3" in ran or any(effect.evidence != ALONE for effect in verdict.outcome.effects)
    if ran & {"P0", "P1"}:
        return "probes+reruns" if rerun else "probes"
    return "reruns" if rerun else "logs"


def called(verdict: Verdict) -> Same:
    """One word for a verdict: different if either answer is, otherwise what its evidence can tell.

    Of runs that sampled their own responses, only the outcome can be told from their curves.
    """
    outcome, computation = verdict.outcome, verdict.computation
    if "different" in (outcome.verdict, computation.verdict):
        return "different"
    if outcome.pairing == "free-running":
        return "same" if outcome.verdict == "equivalent" else "inconclusive"
    return computation.verdict


@dataclass(frozen=True)
class PowerRow:
    """One pair of runs whose truth is known, and what was said of it."""

    name: str
    kind: Literal["mutation", "honest"]
    """A run with a bug put in on purpose, or a pair that differs by nothing but rounding."""
    algorithm: str
    verdicts: dict[Evidence, Same]
    """Empty where the pair does not count: its two runs are equal in every bit, or one has ended early."""
    named: str | None
    """The first difference that probes named."""
    published: bool | None
    """Whether the published rules hold, which call the pair the same then; None without curves."""
    model: str = ""
    dtype: str = ""
    steps: int = 0
    note: str = ""
    """Why it does not count."""


@dataclass(frozen=True)
class Counts:
    """Verdicts with one kind of evidence; what is neither of both was called inconclusive."""

    mutations: int
    caught: int
    missed: int
    """Called the same, or equivalent."""
    honest: int
    accused: int
    """Honest pairs that were called different."""
    accepted: int

    @property
    def miss_rate(self) -> Interval | None:
        """The 95 % interval of the share of mutations that are not caught; None where none was tried."""
        return wilson(self.mutations - self.caught, self.mutations)

    @property
    def false_alarm_rate(self) -> Interval | None:
        return wilson(self.accused, self.honest)


@dataclass(frozen=True)
class Power:
    protocol: str
    """The pairs and how they were run, in a sentence."""
    date: str
    rows: tuple[PowerRow, ...]

    def of(self, evidence: Evidence) -> Counts | None:
        """Counts of the verdicts with this evidence; None where no pair was tried with it."""
        tried = [row for row in self.rows if evidence in row.verdicts]
        if not tried:
            return None
        counts = Counter((row.kind, row.verdicts[evidence]) for row in tried)
        return Counts(
            mutations=sum(row.kind == "mutation" for row in tried),
            caught=counts["mutation", "different"],
            missed=counts["mutation", "same"],
            honest=sum(row.kind == "honest" for row in tried),
            accused=counts["honest", "different"],
            accepted=counts["honest", "same"],
        )

    def told(self, evidence: Evidence) -> dict[str, Any] | None:
        """Power of this evidence for the reader of a verdict, as JSON."""
        counts = self.of(evidence)
        about = {"evidence": evidence, "protocol": self.protocol, "date": self.date}
        return None if counts is None else {**about, **asdict(counts)}

    def as_json(self) -> dict[str, Any]:
        return {
            "protocol": self.protocol,
            "date": self.date,
            "evidence": {name: asdict(counts) for name in EVIDENCE if (counts := self.of(name)) is not None},
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
    source = files("isotrain.tools.parity").joinpath(_PACKAGED) if path is None else path
    try:
        text = source.read_bytes()
    except FileNotFoundError:
        return None
    try:
        # Counts that were written beside the rows are computed again.
        return TypeAdapter(Power).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"{source}: not a power table: {where}: {first['msg']}; make it again") from error
