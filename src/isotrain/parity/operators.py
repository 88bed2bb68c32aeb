"""P0: does every operator of a training step round as well as the reference's does?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.errors import DataError
from isotrain.parity.levels import Check, Level, not_run
from isotrain.parity.sources.bounded import Source, clipped, inside

RECORD = "layer_trace/operators.json"

# Rounding units of the types that results have: errors are compared in them.
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# Between a processor's instruction sets and over fused operators, honest pairs reached a ratio of 2.3 with
# float32 results and of 1.3 with shorter ones, and honest operators by themselves 6.6 and 3.4 units.
LARGEST_RATIO = {"float64": 30.0, "float32": 30.0, "float16": 4.0, "bfloat16": 4.0}
LARGEST_ALONE = {"float64": 200.0, "float32": 200.0, "float16": 12.0, "bfloat16": 12.0}

_MAX_BYTES, _MAX_OPERATORS, _MAX_TEXT = 64 << 20, 100_000, 20_000
_SHOWN = 500

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Operator:
    """One signature of a step: how far its results are from float64."""

    name: str
    shapes: str
    dtypes: str
    result: str
    """Type of the result that was furthest off."""
    error: float
    terms: float
    """How many numbers were summed for each number of the result, as far as shapes tell."""
    non_finite: int
    statistics: dict[str, float]

    @property
    def key(self) -> Key:
        return self.name, self.shapes, self.dtypes

    @property
    def unit(self) -> float:
        """The error of a result that was rounded once; sums are rounded in float32, term by term."""
        return max(EPS[self.result], EPS["float32"] * math.sqrt(self.terms)) / 4

    @property
    def units(self) -> float:
        return math.inf if self.non_finite else self.error / self.unit

    @property
    def excess(self) -> float:
        """Above 1: too far off, whatever a reference does."""
        return self.units / LARGEST_ALONE[self.result]


@dataclass(frozen=True)
class Pair:
    reference: Operator
    candidate: Operator

    @property
    def ratio(self) -> float:
        """How many times worse the candidate is; a reference that is better than one unit counts as one."""
        if self.candidate.non_finite > self.reference.non_finite:
            return math.inf
        own, other = self.candidate, self.reference
        return (own.error / own.unit) / max(other.error / other.unit, 1.0)

    @property
    def limit(self) -> float:
        return LARGEST_RATIO[self.candidate.result]

    @property
    def excess(self) -> float:
        return self.ratio / self.limit


def operators_level(reference: Path, candidate: Path) -> Level:
    """Level P0 over two run directories."""
    for run, role in ((reference, "reference"), (candidate, "candidate")):
        if not (run / RECORD).exists():
            return not_run(
                "P0", f"the {role} has no {RECORD}: set observe.operators=true in both recipes for it"
            )
    theirs, ours = _read(reference), _read(candidate)
    pairs = [
        Pair(theirs.operators[key], own) for key, own in ours.operators.items() if key in theirs.operators
    ]
    pairs.sort(key=lambda pair: pair.excess, reverse=True)
    alone = [own for key, own in ours.operators.items() if key not in theirs.operators]
    alone.sort(key=lambda own: own.excess, reverse=True)
    evidence = {
        "operators": [_shown(pair) for pair in pairs[:_SHOWN]],
        "missing": [
            *(_missing(own, "reference") for own in alone[:_SHOWN]),
            *(_missing(o, "candidate") for k, o in theirs.operators.items() if k not in ours.operators),
        ][: 2 * _SHOWN],
        "no_oracle": {"reference": theirs.no_oracle[:_SHOWN], "candidate": ours.no_oracle[:_SHOWN]},
    }
    return _preferences(pairs, alone, evidence)


def _preferences(pairs: list[Pair], alone: list[Operator], evidence: dict[str, Any]) -> Level:
    if not pairs:
        words = (
            "no operator is called with the same shapes and types in both runs: have they the same recipe?"
        )
        return Level("P0", "cannot tell", words, evidence=evidence)
    checks = _checks(pairs, alone)
    bad = [pair for pair in pairs if pair.excess > 1]
    bad_alone = [operator for operator in alone if operator.excess > 1]
    if not bad and not bad_alone:
        most = max(pairs, key=lambda pair: pair.ratio)
        words = (
            f"all {len({pair.candidate.name for pair in pairs})} operators of a step, "
            f"at {len(pairs)} shapes, round as well as the reference's "
            f"(largest error ratio {most.ratio:.2g}, {_short(most.candidate)})"
        )
        if alone:
            words += f"; {len(alone)} calls that the reference does not make, as well as their types allow"
        return Level("P0", "same", words, checks, evidence=evidence)
    found = [_worse(pair) for pair in bad] + [_wrong(operator) for operator in bad_alone]
    words = found[0] + (f", and {len(found) - 1} more calls are too far off" if len(found) > 1 else "")
    names = dict.fromkeys(_short(o) for o in (*(pair.candidate for pair in bad), *bad_alone))
    causes = tuple(f"the candidate's kernel of {name}" for name in list(names)[:3])
    return Level("P0", "different", words, checks, causes, evidence)


def _checks(pairs: list[Pair], alone: list[Operator]) -> tuple[Check, ...]:
    """The pair, and the operator without one, that come closest to their limits."""
    pair = pairs[0]
    name, place = "error over the reference's", _place(pair.candidate)
    checks = [Check(name, _finite(pair.ratio), pair.limit, pair.excess <= 1, place)]
    if alone:
        own = alone[0]
        name, limit = "error in rounding units, not called by the reference", LARGEST_ALONE[own.result]
        checks.append(Check(name, _finite(own.units), limit, own.excess <= 1, _place(own)))
    return tuple(checks)


def _worse(pair: Pair) -> str:
    if math.isinf(pair.ratio):
        return _not_finite(pair.candidate)
    own = pair.candidate
    return f"{_short(own)} rounds {pair.ratio:.3g} times worse than the reference's, at {own.shapes}"


def _wrong(operator: Operator) -> str:
    if operator.non_finite:
        return _not_finite(operator)
    return (
        f"{_short(operator)}, which the reference does not call, is off by {operator.units:.3g} "
        f"rounding units, at {operator.shapes}"
    )


def _not_finite(operator: Operator) -> str:
    return (
        f"{_short(operator)} returns {operator.non_finite} values that are not finite, at {operator.shapes}"
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 1e30  # JSON has no infinity


def _short(operator: Operator) -> str:
    return operator.name.removesuffix(".default")


def _place(operator: Operator) -> str:
    return f"{_short(operator)} at {operator.shapes}"


def _shown(pair: Pair) -> dict[str, Any]:
    own = pair.candidate
    return {
        "operator": own.name,
        "shapes": own.shapes,
        "dtype": own.result,
        "reference": pair.reference.statistics,
        "candidate": own.statistics,
        "ratio": _finite(pair.ratio),
    }


def _missing(operator: Operator, where: str) -> dict[str, Any]:
    return {
        "operator": operator.name,
        "shapes": operator.shapes,
        "dtype": operator.result,
        "missing in": where,
        "error": operator.error,
        "units": _finite(operator.units),
    }


@dataclass(frozen=True)
class _Record:
    operators: dict[Key, Operator]
    no_oracle: list[str]


def _read(run: Path) -> _Record:
    source = Source(inside(run, RECORD), RECORD)
    content = source.json_object(_MAX_BYTES)
    listed, without = content.get("operators"), content.get("no_oracle", [])
    if not isinstance(listed, list) or len(listed) > _MAX_OPERATORS:
        raise source.error(f'no list "operators" of at most {_MAX_OPERATORS:,}')
    if not isinstance(without, list) or not all(isinstance(name, str) for name in without):
        raise source.error('"no_oracle" are not names')
    operators: dict[Key, Operator] = {}
    for number, row in enumerate(listed):
        operator = _operator(source, number, row)
        if operator.key in operators:
            raise source.error(
                f"operator {number}: {clipped(operator.name)} comes twice with the same shapes"
            )
        operators[operator.key] = operator
    return _Record(operators, [name[:200] for name in without[:_MAX_OPERATORS]])


_STATISTICS = ("error", "cosine", "max_abs", "max_rel", "within_0.1%", "within_0.5%")


def _operator(source: Source, number: int, row: Any) -> Operator:
    def wrong(what: str) -> DataError:
        return source.error(f"operator {number}: {what}; record the step again")

    if not isinstance(row, dict):
        raise wrong("not a JSON object")
    texts = [row.get(name) for name in ("operator", "shapes", "dtypes")]
    if not all(isinstance(text, str) and len(text) <= _MAX_TEXT and text.isprintable() for text in texts):
        raise wrong('"operator", "shapes" and "dtypes" are not short texts')
    if str(row.get("result")) not in EPS:
        raise wrong(f'"result" is {clipped(str(row.get("result")))}, not one of {", ".join(EPS)}')
    numbers = {name: _number(row.get(name)) for name in (*_STATISTICS, "calls", "non_finite", "terms")}
    for name, value in numbers.items():
        if value is None or (value < 0 and name != "cosine"):
            raise wrong(f'"{name}" is not a number: {clipped(str(row.get(name)))}')
    known = {name: value for name, value in numbers.items() if value is not None}
    name, shapes, dtypes = (str(text) for text in texts)
    return Operator(
        name=name,
        shapes=shapes,
        dtypes=dtypes,
        result=str(row["result"]),
        error=known["error"],
        terms=max(1.0, known["terms"]),
        non_finite=int(known["non_finite"]),
        statistics={name: known[name] for name in (*_STATISTICS, "calls")},
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -1e300 < value < 1e300 else None
