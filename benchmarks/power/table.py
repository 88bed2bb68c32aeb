"""The power table as Markdown, for the documentation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from isotrain.tools.parity.compare.power import EVIDENCE, Evidence, Power, PowerRow
from isotrain.tools.parity.compare.statistics import Interval


def markdown(power: Power) -> str:
    return "\n".join(
        [*_by_evidence(power), "", *_by_model(power), "", *_missed(power), "", *_not_counted(power)]
    )


def _by_evidence(power: Power) -> Iterator[str]:
    bugs = "bugs | found | called the same | inconclusive | share not found, 95 %"
    yield f"| evidence | {bugs} | honest pairs | called different | called the same | false alarms, 95 % |"
    yield "|" + "---|" * 10
    for evidence, words in EVIDENCE.items():
        found = power.of(evidence)
        if found is None:
            continue
        doubt = found.mutations - found.caught - found.missed
        cells = (
            *(words, found.mutations, found.caught, found.missed, doubt, _share(found.miss_rate)),
            *(found.honest, found.accused, found.accepted, _share(found.false_alarm_rate)),
        )
        yield f"| {' | '.join(map(str, cells))} |"


def _share(found: Interval | None) -> str:
    if found is None:
        return "-"
    return f"{math.floor(100 * found.low)} to {math.ceil(100 * found.high)} %"


def _by_model(power: Power) -> Iterator[str]:
    yield f"| bugs found, honest pairs accused | {' | '.join(EVIDENCE)} |"
    yield "|---|" + "---|" * len(EVIDENCE)
    for of in (lambda row: row.model, lambda row: row.dtype, lambda row: f"{row.steps} steps"):
        for value in dict.fromkeys(map(of, power.rows)):
            cells = [_found_of([row for row in power.rows if of(row) == value], e) for e in EVIDENCE]
            yield f"| {value} | {' | '.join(cells)} |"


def _found_of(rows: list[PowerRow], evidence: Evidence) -> str:
    told = Counter(
        (row.kind, row.verdicts[evidence] == "different") for row in rows if evidence in row.verdicts
    )
    bugs = told["mutation", True] + told["mutation", False]
    honest = told["honest", True] + told["honest", False]
    return f"{told['mutation', True]} of {bugs}, {told['honest', True]} of {honest}" if bugs + honest else "-"


def _missed(power: Power) -> Iterator[str]:
    """Bugs that nothing found, and honest pairs that something accused."""
    yield "| truth | run | what | calls |"
    yield "|---|---|---|---|"
    for row in power.rows:
        calls = set(row.verdicts.values())
        wrong = "different" not in calls if row.kind == "mutation" else "different" in calls
        if row.verdicts and wrong:
            told = ", ".join(f"{evidence}: {call}" for evidence, call in row.verdicts.items())
            yield f"| {row.kind} | {_run(row)} | {row.name} | {told} |"


def _not_counted(power: Power) -> Iterator[str]:
    yield "| not counted | run | what | why |"
    yield "|---|---|---|---|"
    yield from (
        f"| {row.kind} | {_run(row)} | {row.name} | {row.note} |" for row in power.rows if not row.verdicts
    )


def _run(row: PowerRow) -> str:
    return f"{row.algorithm} {row.model} {row.dtype} {row.steps}"
