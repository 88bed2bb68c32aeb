"""P0: is every operator of a training step right up to rounding, in both runs?"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from isotrain.language import tr
from isotrain.tools.parity.certify.certificate import printable, problems_of
from isotrain.tools.parity.levels.level import Check, Level, not_run
from isotrain.tools.parity.levels.score_tests import quantile
from isotrain.tools.parity.read.bounded import Source, inside
from isotrain.tools.parity.run import ROLES

RECORD = "layer_trace/operators.json"

# Rounding units of the types that results have: errors are compared in them.
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# In rounding units. Honest operators reached 53 with float32 results (the backward pass of attention in
# SmolLM2; a softmax over 49,152 numbers 22) and 3.4 with shorter ones.
LARGEST = {"float64": 200.0, "float32": 200.0, "float16": 8.0, "bfloat16": 8.0}
# Rounding to nearest has no sign, approximations of functions and sums in one order have: by so much may the
# results of a right kernel be too large or small. Float32 sums drift by up to an eighth of a digit each term.
# In bfloat16, torch's embedding_dense_backward on a CPU, which adds row after row, has reached 0.11 %.
_GAIN = {"float64": 4 * 2.0**-52, "float32": 4 * 2.0**-23, "float16": 5e-4, "bfloat16": 2e-3}
_GAIN_OF_A_TERM = {"float64": 2.0**-52 / 8, "float32": 2.0**-23 / 8, "float16": 0.0, "bfloat16": 0.0}

_SIZES = re.compile(r"\d{1,15}")
_MAX_BYTES, _MAX_OPERATORS = 64 << 20, 100_000
_SHOWN = 500
_ALIKE = 4.0
"""An operator that is off in both runs is different where one is so many times further off."""

Key = tuple[str, str, str]


Text = Annotated[str, Field(max_length=20_000), AfterValidator(printable)]
Size = Annotated[float, Field(ge=0, lt=1e300)]
Signed = Annotated[float, Field(gt=-1e300, lt=1e300)]


class Operator(BaseModel):
    """One signature of a step, as a stranger may have recorded it: how far its results are from float64."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    name: Text = Field(alias="operator")
    shapes: Text
    dtypes: Text
    result: Literal["float64", "float32", "float16", "bfloat16"]
    """Type of the result that was furthest off."""
    error: Size
    terms: Size
    """How many numbers were summed for each number of the result, as far as shapes tell."""
    non_finite: Annotated[int, Field(ge=0)]
    gain: Signed = 0.0
    """By which share all of the result is too large, with its standard error over `blocks` parts."""
    gain_error: Size = 0.0
    blocks: Annotated[int, Field(ge=0)] = 0

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
    def largest_gain(self) -> float:
        # Softmax and norms sum along a dimension that their result has as well.
        longest = max((float(size) for size in _SIZES.findall(self.shapes)), default=1.0)
        return max(_GAIN[self.result], _GAIN_OF_A_TERM[self.result] * max(self.terms, longest))

    def off(self, tests: int) -> Off:
        """The statistic that is closest to its limit, or furthest beyond it; `tests` are all gains tested."""
        rms = Off("rms", self.units / LARGEST[self.result])
        if self.blocks < 2 or abs(self.gain) <= quantile(tests, self.blocks) * self.gain_error:
            return rms
        return max(rms, Off("gain", abs(self.gain) / self.largest_gain), key=lambda off: off.excess)


@dataclass(frozen=True)
class Off:
    statistic: Literal["rms", "gain"]
    excess: float
    """Above 1: too far off, whatever a reference does."""


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


@dataclass(frozen=True)
class Wrong:
    """An operator that is off in one run, and not as far in the other."""

    operator: Operator
    off: Off
    role: Literal["reference", "candidate"]

    @property
    def words(self) -> str:
        operator, names = self.operator, {"name": _short(self.operator), "shapes": self.operator.shapes}
        if operator.non_finite:
            words = tr(
                "{name} returns {count} values that are not finite, at {shapes}",
                count=operator.non_finite,
                **names,
            )
        elif self.off.statistic == "gain":
            share = {
                "percent": f"{100 * abs(operator.gain):.3g}",
                "error": f"{100 * operator.gain_error:.1g}",
            }
            words = (
                tr("{name} is {percent} % (+- {error}) too large, at {shapes}", **names, **share)
                if operator.gain > 0
                else tr("{name} is {percent} % (+- {error}) too small, at {shapes}", **names, **share)
            )
        else:
            words = tr(
                "{name} is off by {units:.3g} rounding units, at {shapes}", units=operator.units, **names
            )
        return words if self.role == "candidate" else tr("in the reference {words}", words=words)


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
    pairs.sort(key=lambda pair: pair.ratio, reverse=True)
    tests = max(1, len(ours) + len(theirs))
    off = {role: {k: o.off(tests) for k, o in side.items()} for role, side in _by_role(theirs, ours)}
    alone = [key for key in ours if key not in theirs]
    alone.sort(key=lambda key: off["candidate"][key].excess, reverse=True)
    evidence = {
        "operators": [_shown(pair) for pair in pairs[:_SHOWN]],
        "missing": [
            *(_missing(ours[key], "reference") for key in alone[:_SHOWN]),
            *(_missing(o, "candidate") for k, o in theirs.items() if k not in ours),
        ][: 2 * _SHOWN],
        "no_oracle": {"reference": their_rest, "candidate": our_rest},
    }
    if not pairs:
        words = tr(
            "no operator is called with the same shapes and types in both runs: have they the same recipe?"
        )
        return Level("P0", "cannot tell", words, evidence=evidence)
    wrong = [
        Wrong(operator, here, role)
        for role, side in _by_role(theirs, ours)
        for key, operator in side.items()
        if _is_wrong(here := off[role][key], off[_OTHER[role]].get(key))
    ]
    wrong.sort(key=lambda one: (one.role, -one.off.excess))
    checks = tuple(_checks(ours, off["candidate"]))
    if not wrong:
        return Level("P0", "same", _agreement(pairs, len(alone)), checks, evidence=evidence)
    words = wrong[0].words
    if len(wrong) > 1:
        words = tr("{words}, and {count} more calls are too far off", words=words, count=len(wrong) - 1)
    causes = dict.fromkeys(
        tr("the {role}'s kernel of {name}", role=ROLES[call.role], name=_short(call.operator))
        for call in wrong
    )
    return Level("P0", "different", words, checks, tuple(causes)[:3], evidence)


Operators = dict[Key, Operator]
_OTHER: dict[str, Literal["reference", "candidate"]] = {"reference": "candidate", "candidate": "reference"}


def _by_role(
    theirs: Operators, ours: Operators
) -> tuple[tuple[Literal["reference"], Operators], tuple[Literal["candidate"], Operators]]:
    return ("reference", theirs), ("candidate", ours)


def _is_wrong(here: Off, there: Off | None) -> bool:
    """Beyond its limit, and not about as far in the other run: two runs with one sloppy kernel are alike."""
    return here.excess > max(1.0, _ALIKE * there.excess if there is not None else 0.0)


def _agreement(pairs: list[Pair], alone: int) -> str:
    most = max(pairs, key=lambda pair: pair.ratio)
    words = tr(
        "all {operators} operators of a step, at {shapes} shapes, round as well as the reference's "
        "(largest error ratio {ratio:.2g}, {worst})",
        operators=len({pair.candidate.name for pair in pairs}),
        shapes=len(pairs),
        ratio=most.ratio,
        worst=_short(most.candidate),
    )
    if not alone:
        return words
    return tr(
        "{words}; {count} calls that the reference does not make, as well as their types allow",
        words=words,
        count=alone,
    )


def _checks(ours: Operators, off: dict[Key, Off]) -> Iterator[Check]:
    """The candidate's operator that comes closest to the limit of each statistic."""
    worst = max(ours.values(), key=lambda operator: operator.units / LARGEST[operator.result])
    limit = LARGEST[worst.result]
    units, name = _finite(worst.units), tr("error in rounding units")
    yield Check(name, units, limit, units <= limit, _place(worst))
    by_gain = max(ours, key=lambda key: off[key].excess if off[key].statistic == "gain" else 0.0)
    if off[by_gain].statistic == "gain":
        operator = ours[by_gain]
        gain, limit = abs(operator.gain), operator.largest_gain
        yield Check(tr("gain"), gain, limit, gain <= limit, _place(operator))


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
        "reference": pair.reference.error,
        "candidate": operator.error,
        "ratio": _finite(pair.ratio),
    }


def _missing(operator: Operator, where: str) -> dict[str, Any]:
    return {"operator": operator.name, "shapes": operator.shapes, "missing in": where}


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
