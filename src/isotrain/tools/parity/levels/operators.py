"""P0: does every operator of a training step round as well as the reference's does?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from isotrain.language import tr
from isotrain.tools.parity.certify.certificate import printable, problems_of
from isotrain.tools.parity.levels.level import Check, Level, not_run
from isotrain.tools.parity.read.bounded import Source, inside
from isotrain.tools.parity.run import ROLES

RECORD = "layer_trace/operators.json"

# Rounding units of the types that results have: errors are compared in them.
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# Between a processor's instruction sets and over fused operators, honest pairs reached a ratio of 2.3 with
# float32 results and of 1.3 with shorter ones, and honest operators by themselves 6.6 and 3.4 units.
LARGEST_RATIO = {"float64": 30.0, "float32": 30.0, "float16": 4.0, "bfloat16": 4.0}
LARGEST_ALONE = {"float64": 200.0, "float32": 200.0, "float16": 12.0, "bfloat16": 12.0}

_MAX_BYTES, _MAX_OPERATORS = 64 << 20, 100_000
_NO_STATISTICS = {"name", "shapes", "dtypes", "result", "terms", "non_finite"}
_SHOWN = 500

Key = tuple[str, str, str]


Text = Annotated[str, Field(max_length=20_000), AfterValidator(printable)]
Size = Annotated[float, Field(ge=0, lt=1e300)]


class Operator(BaseModel):
    """One signature of a step, as a stranger may have recorded it: how far its results are from float64."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    name: Text = Field(alias="operator")
    shapes: Text
    dtypes: Text
    result: Literal["float64", "float32", "float16", "bfloat16"]
    """Type of the result that was furthest off."""
    error: Size
    cosine: Annotated[float, Field(gt=-1e300, lt=1e300)]
    max_abs: Size
    max_rel: Size
    within_thousandth: Size = Field(alias="within_0.1%")
    within_two_hundredth: Size = Field(alias="within_0.5%")
    calls: Size
    terms: Size
    """How many numbers were summed for each number of the result, as far as shapes tell."""
    non_finite: Annotated[int, Field(ge=0)]

    @property
    def statistics(self) -> dict[str, float]:
        return self.model_dump(by_alias=True, exclude=_NO_STATISTICS)

    @property
    def key(self) -> Key:
        return self.name, self.shapes, self.dtypes

    @property
    def unit(self) -> float:
        """The error of a result that was rounded once; sums are rounded in float32, term by term."""
        return max(EPS[self.result], EPS["float32"] * math.sqrt(max(1.0, self.terms))) / 4

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
        candidate, other = self.candidate, self.reference
        return (candidate.error / candidate.unit) / max(other.error / other.unit, 1.0)

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
            lacks = tr(
                "the {role} has no {record}: set observe.operators=true in both recipes for it",
                role=ROLES[role],
                record=RECORD,
            )
            return not_run("P0", lacks)
    (theirs, their_rest), (ours, our_rest) = _read(reference), _read(candidate)
    pairs = [Pair(theirs[key], operator) for key, operator in ours.items() if key in theirs]
    pairs.sort(key=lambda pair: pair.excess, reverse=True)
    alone = [operator for key, operator in ours.items() if key not in theirs]
    alone.sort(key=lambda operator: operator.excess, reverse=True)
    evidence = {
        "operators": [_shown(pair) for pair in pairs[:_SHOWN]],
        "missing": [
            *(_missing(operator, "reference") for operator in alone[:_SHOWN]),
            *(_missing(o, "candidate") for k, o in theirs.items() if k not in ours),
        ][: 2 * _SHOWN],
        "no_oracle": {"reference": their_rest, "candidate": our_rest},
    }
    return _preferences(pairs, alone, evidence)


def _preferences(pairs: list[Pair], alone: list[Operator], evidence: dict[str, Any]) -> Level:
    if not pairs:
        words = tr(
            "no operator is called with the same shapes and types in both runs: have they the same recipe?"
        )
        return Level("P0", "cannot tell", words, evidence=evidence)
    checks = _checks(pairs, alone)
    bad = [pair for pair in pairs if pair.excess > 1]
    bad_alone = [operator for operator in alone if operator.excess > 1]
    if not bad and not bad_alone:
        most = max(pairs, key=lambda pair: pair.ratio)
        words = tr(
            "all {operators} operators of a step, at {shapes} shapes, round as well as the reference's "
            "(largest error ratio {ratio:.2g}, {worst})",
            operators=len({pair.candidate.name for pair in pairs}),
            shapes=len(pairs),
            ratio=most.ratio,
            worst=_short(most.candidate),
        )
        if alone:
            words = tr(
                "{words}; {count} calls that the reference does not make, as well as their types allow",
                words=words,
                count=len(alone),
            )
        return Level("P0", "same", words, checks, evidence=evidence)
    sentences = [_worse(pair) for pair in bad] + [_wrong(operator) for operator in bad_alone]
    words = sentences[0]
    if len(sentences) > 1:
        words = tr("{words}, and {count} more calls are too far off", words=words, count=len(sentences) - 1)
    names = dict.fromkeys(_short(o) for o in (*(pair.candidate for pair in bad), *bad_alone))
    causes = tuple(tr("the candidate's kernel of {name}", name=name) for name in list(names)[:3])
    return Level("P0", "different", words, checks, causes, evidence)


def _checks(pairs: list[Pair], alone: list[Operator]) -> tuple[Check, ...]:
    """The pair, and the operator without one, that come closest to their limits."""
    pair = pairs[0]
    name, place = tr("error over the reference's"), _place(pair.candidate)
    checks = [Check(name, _finite(pair.ratio), pair.limit, pair.excess <= 1, place)]
    if alone:
        operator = alone[0]
        name, limit = (
            tr("error in rounding units, not called by the reference"),
            LARGEST_ALONE[operator.result],
        )
        checks.append(Check(name, _finite(operator.units), limit, operator.excess <= 1, _place(operator)))
    return tuple(checks)


def _worse(pair: Pair) -> str:
    if math.isinf(pair.ratio):
        return _not_finite(pair.candidate)
    operator = pair.candidate
    return tr(
        "{name} rounds {ratio:.3g} times worse than the reference's, at {shapes}",
        name=_short(operator),
        ratio=pair.ratio,
        shapes=operator.shapes,
    )


def _wrong(operator: Operator) -> str:
    if operator.non_finite:
        return _not_finite(operator)
    return tr(
        "{name}, which the reference does not call, is off by {units:.3g} rounding units, at {shapes}",
        name=_short(operator),
        units=operator.units,
        shapes=operator.shapes,
    )


def _not_finite(operator: Operator) -> str:
    return tr(
        "{name} returns {count} values that are not finite, at {shapes}",
        name=_short(operator),
        count=operator.non_finite,
        shapes=operator.shapes,
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 1e30  # JSON has no infinity


def _short(operator: Operator) -> str:
    return operator.name.removesuffix(".default")


def _place(operator: Operator) -> str:
    return tr("{name} at {shapes}", name=_short(operator), shapes=operator.shapes)


def _shown(pair: Pair) -> dict[str, Any]:
    operator = pair.candidate
    return {
        "operator": operator.name,
        "shapes": operator.shapes,
        "dtype": operator.result,
        "reference": pair.reference.statistics,
        "candidate": operator.statistics,
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


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    operators: Annotated[list[Operator], Field(max_length=_MAX_OPERATORS)]
    no_oracle: list[str] = []


def _read(run: Path) -> tuple[dict[Key, Operator], list[str]]:
    """The operators by their signature, and the names of those without a float64 to be compared with."""
    source = Source(inside(run, RECORD), RECORD)
    try:
        record = _Record.model_validate_json(source.whole(_MAX_BYTES))
    except ValidationError as error:
        raise source.error(f"{problems_of(error)}; record the step again") from error
    operators = {operator.key: operator for operator in record.operators}
    if len(operators) < len(record.operators):
        raise source.error("an operator comes twice with the same shapes; record the step again")
    return operators, [name[:200] for name in record.no_oracle[:_SHOWN]]
