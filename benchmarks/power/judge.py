"""What parity says of each pair of finished runs, with more and more evidence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isotrain.errors import IsotrainError
from isotrain.tools.parity.compare.power import Evidence, called
from isotrain.tools.parity.protocol import Companions, verdict_on
from isotrain.tools.parity.verdict import Same
from power.runs import metrics_digest


@dataclass(frozen=True)
class Case:
    """One pair as files: picklable, because cases are judged in processes of their own."""

    reference: Path
    candidate: Path
    members: tuple[Path, ...]
    control: Path | None
    evidence: tuple[Evidence, ...]
    result: Path | None = None
    """Of the sampler's test."""


@dataclass(frozen=True)
class Judged:
    verdicts: Mapping[Evidence, Same]
    named: str | None = None
    published: bool | None = None
    note: str = ""


def judge_case(case: Case) -> Judged:
    if case.control is not None and metrics_digest(case.control) == metrics_digest(case.candidate):
        return Judged({}, note="equal in every bit")
    try:
        return _sampler(case) if case.result is not None else _curves(case)
    except IsotrainError as error:
        return Judged({}, note=f"could not be compared: {error}")


def _sampler(case: Case) -> Judged:
    assert case.result is not None
    found = json.loads(case.result.read_text())
    return Judged({"sampler": found["verdict"]}, named=found["words"])


def _curves(case: Case) -> Judged:
    verdicts: dict[Evidence, Same] = {}
    named, published = None, None
    for evidence in case.evidence:
        # A log is the curves alone: no recipe, no digests, no layers.
        logs = evidence in ("logs", "reruns")
        one, other, *members = (
            path / "metrics.jsonl" if logs else path
            for path in (case.reference, case.candidate, *case.members)
        )
        reruns: Sequence[Path] = members if evidence in ("reruns", "probes+reruns") else ()
        verdict = verdict_on(one, other, Companions(reruns))
        verdicts[evidence] = called(verdict)
        published = not verdict.comparison.broken
        if not logs and verdict.level("P1").state == "different":
            named = verdict.level("P1").words
    return Judged(verdicts, named, published)
