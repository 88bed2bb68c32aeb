"""The levels of operators and layers from two dumps of msprobe, as far as statistics of tensors can tell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from isotrain.language import listed, tr
from isotrain.tools.parity.levels.dump_errors import AGREES, DumpLimits, DumpRating, coarsest, typical, worst
from isotrain.tools.parity.levels.layer_errors import NOT_A_NUMBER
from isotrain.tools.parity.levels.level import Check, Level, not_run
from isotrain.tools.parity.read.msprobe_dump import (
    Call,
    DumpedStep,
    Place,
    Tensor,
    common_places,
    places,
    read_part,
)

_KINDS = {"forward": "activation", "backward": "gradient", "parameters_grad": "parameter gradient"}
_NAMED = 3
# An API may hand on what its inputs already differ by, and more of it where large numbers cancel.
_AMPLIFIES = 16.0
# Of so many elements at least one is made where an API is taken for a sum or a mean.
_REDUCED = 8
# Constants are small numbers; what a mask is filled with depends on the type.
_LARGEST_CONSTANT, _SAME_CONSTANT = 1e4, 1e-6
_LIMITS = tr(
    "max, min, mean and norm do not show every difference: tensors with the same four numbers can differ"
)
_NO_ORACLE = tr("a dump has no float64 to compare with")
_SAME_INPUT = tr("dump both runs from the same checkpoint, on the same batch and the same responses")
_PLURAL = {
    "activation": tr("activations"),
    "gradient": tr("gradients"),
    "parameter gradient": tr("parameter gradients"),
}


@dataclass(frozen=True)
class Compared:
    """One call of both runs."""

    step: int
    label: str
    call: Call
    inputs: DumpRating
    outputs: DumpRating
    weights: DumpRating
    constants: tuple[str, ...]
    """Arguments that differ, in words."""
    later: bool
    """Whether weights may have been updated before it in the dump."""

    @property
    def name(self) -> str:
        number = f" (call {self.call.number})" if self.call.number and self.call.is_module else ""
        counted = self.call.what if self.call.is_module else f"{self.call.what}.{self.call.number}"
        where = f" in {self.call.parent}" if self.call.parent and not self.call.is_module else ""
        stage = f", {self.label}" if self.label else ""
        return f"{counted}{number}{where}{stage}"

    @property
    def kind(self) -> str:
        return _KINDS[self.call.direction]

    @property
    def is_to_blame(self) -> bool:
        """Equal inputs and other outputs."""
        # Gradients of weights follow from tensors that are elsewhere in the dump.
        if self.call.direction == "parameters_grad" or _is_lookup(self.call):
            return False
        if not (self.inputs.passed and self.weights.passed):
            return False
        beyond = not self.outputs.passed and self.outputs.error > _AMPLIFIES * self.inputs.error
        return beyond or bool(self.constants)


def _is_lookup(call: Call) -> bool:
    """Rows of a table by token ids: nothing is rounded, and two numbers do not tell which ids."""
    if call.direction != "forward":
        return False
    if not call.is_module:
        return call.what.endswith(".embedding")
    integers = [tensor.is_integer for tensor in call.inputs]
    return "embedding" in call.type_name.lower() and bool(integers) and all(integers)


@dataclass
class _Findings:
    compared: list[Compared] = field(default_factory=list)
    premise: str | None = None
    """Why the runs are not at the same point: other weights or other tokens."""
    one_sided: int = 0
    """Calls that only one of the runs makes."""
    statistics: bool = False

    def of(self, *, modules: bool) -> list[Compared]:
        return [compared for compared in self.compared if compared.call.is_module == modules]


def dump_levels(reference: Path, candidate: Path) -> tuple[Level, Level]:
    """P0 from the APIs and P1 from the modules of two dumps."""
    a, b = places(reference), places(candidate)
    both = common_places(a, b)
    if not both:
        why = tr(
            "the dumps have no step and rank in common: {one} and {other}", one=_listed(a), other=_listed(b)
        )
        return not_run("P0", why), not_run("P1", why)
    findings = _Findings()
    for part, other_part in both:
        if findings.premise is None:
            _add(findings, part, read_part(part), read_part(other_part), first=part.step == both[0][0].step)
    if not findings.statistics:
        why = tr("the dumps have no statistics; set summary_mode to statistics in msprobe's config.json")
        return not_run("P0", why), not_run("P1", why)
    return _apis(findings), _modules(findings)


def _listed(places_there: Sequence[Place]) -> str:
    names = ", ".join("/".join(place.parts) or "." for place in places_there[:_NAMED])
    more = len(places_there) - _NAMED
    return tr("{names} and {count} more", names=names, count=more) if more > 0 else names


def _add(findings: _Findings, place: Place, a: DumpedStep, b: DumpedStep, *, first: bool) -> None:
    findings.statistics = findings.statistics or (a.has_statistics and b.has_statistics)
    pairs, one_sided = _pairs(a, b)
    findings.one_sided += one_sided
    dtype = coarsest([tensor for call, other in pairs for tensor in (*call.outputs, *other.outputs)])
    new: list[Compared] = []
    later, went_back = not first, False
    for position, (call, other) in enumerate(pairs):
        went_back = went_back or call.direction != "forward"
        # A forward after a backward: there may have been an update between them.
        later = later or (went_back and call.direction == "forward")
        limits = DumpLimits(dtype, position, call.direction != "forward", later, _is_lookup(call))
        new.append(
            Compared(
                place.step,
                place.label,
                call,
                worst(call.inputs, other.inputs, limits),
                worst(call.outputs, other.outputs, limits, partial(_cancelled, call)),
                worst(call.weights, other.weights, limits),
                () if call.is_module else tuple(_constants(call, other)),
                later,
            )
        )
    premise = next(_premises(new), None)
    if premise is None:
        findings.compared += new
    elif not findings.compared:
        step = f"{place.step}, {place.label}" if place.label else place.step
        findings.premise = tr("{premise} at step {step}", premise=premise, step=step)


def _pairs(a: DumpedStep, b: DumpedStep) -> tuple[list[tuple[Call, Call]], int]:
    """Calls that both make, in the order of the reference, and how many are not among them."""
    ours, theirs = _keyed(a), _keyed(b)
    counts = [_counts(part) for part in (ours, theirs)]
    pairs = [
        (call, theirs[key])
        for key, call in ours.items()
        # Where an API is called more often by one run, its numbers do not mean the same calls.
        if key in theirs and counts[0][key[:-1]] == counts[1][key[:-1]]
    ]
    return pairs, len(ours) + len(theirs) - 2 * len(pairs)


def _keyed(part: DumpedStep) -> dict[tuple[Any, ...], Call]:
    """By what they are, and for APIs by where they are called: other kernels make other calls elsewhere."""
    keyed: dict[tuple[Any, ...], Call] = {}
    within: dict[tuple[Any, ...], int] = {}
    for call in part.calls:
        place = (call.is_module, call.what, call.direction, None if call.is_module else call.parent)
        number = call.number
        if not call.is_module:
            number = within.get(place, 0)
            within[place] = number + 1
        key = (*place, number)
        keyed[key] = call
    return keyed


def _counts(keyed: dict[tuple[Any, ...], Call]) -> dict[tuple[Any, ...], int]:
    counts: dict[tuple[Any, ...], int] = {}
    for key, call in keyed.items():
        counts[key[:-1]] = 0 if call.is_module else counts.get(key[:-1], 0) + 1
    return counts


def _cancelled(call: Call, output: Tensor) -> float:
    """The size that the roundings of a sum may have, though its terms cancel each other."""
    terms = max(
        (tensor for tensor in call.inputs if tensor.is_floating), key=lambda tensor: tensor.size, default=None
    )
    if call.is_module or terms is None or not 0 < _REDUCED * output.size <= terms.size:
        return 0.0
    adds = "sum" in call.what or call.direction == "backward"
    return typical(terms) * (math.sqrt(terms.size / output.size) if adds else 1.0)


def _constants(a: Call, b: Call) -> Iterator[str]:
    for name, value in a.arguments.items():
        other = b.arguments.get(name)
        if isinstance(value, str) or isinstance(other, str) or other is None:
            continue
        largest = max(abs(value), abs(other))
        if largest <= _LARGEST_CONSTANT and abs(value - other) > _SAME_CONSTANT * largest:
            yield tr(
                "{name} is {other:.6g} in place of {one:.6g}",
                name=name or tr("its argument"),
                other=other,
                one=value,
            )


def _premises(calls: Sequence[Compared]) -> Iterator[str]:
    """Inputs that must be alike before anything is computed, where they are not."""
    for compared in calls:
        if compared.call.direction != "forward":
            return
        if not compared.weights.passed and not compared.later:
            yield tr(
                "the weights of {name} differ ({size})", name=compared.name, size=_size(compared.weights)
            )
        integers = [tensor for tensor in compared.call.inputs if tensor.is_integer]
        if integers and compared.inputs.statistic in ("values", "shape") and not compared.inputs.passed:
            yield tr("{name} gets other integers (token ids, positions or labels)", name=compared.name)
        elif compared.inputs.statistic == "shape" and not compared.inputs.passed:
            yield tr("{name} gets a tensor of another shape", name=compared.name)
        elif _is_lookup(compared.call) and not compared.outputs.passed:
            yield tr(
                "{name} looks up other rows ({size}): other tokens or other weights",
                name=compared.name,
                size=_size(compared.outputs),
            )


def _size(rating: DumpRating) -> str:
    if rating.error >= NOT_A_NUMBER:
        return tr(
            "{statistic}: no number, or another one where nothing is rounded", statistic=rating.statistic
        )
    return tr(
        "{statistic} off by {error:.1e}, at most {limit:.0e}",
        statistic=rating.statistic,
        error=rating.error,
        limit=rating.limit,
    )


def _modules(findings: _Findings) -> Level:
    if findings.premise is not None:
        return Level("P1", "cannot tell", listed((findings.premise, _SAME_INPUT), ": "), evidence=_DUMPED)
    modules = findings.of(modules=True)
    if not modules:
        return not_run("P1", tr("the dumps have no modules in common; dump with level L0 or mix"))
    beyond = [module for module in modules if not (module.outputs.passed and module.inputs.passed)]
    blamed = next((module for module in modules if module.is_to_blame), None)
    first = blamed or next((module for module in beyond if not module.outputs.passed), None)
    evidence = {**_DUMPED, "first": None if first is None else _layer(first)}
    checks = tuple(_checks(modules))
    if first is None and not beyond:
        words = tr(
            "{modules} agree up to rounding in their statistics", modules=_what(modules, tr("modules"))
        )
        return Level("P1", "same", listed((words, _LIMITS), "; "), checks, evidence=evidence)
    seen = beyond[0]
    words_of_it = [_first(seen)]
    causes: list[str] = []
    if blamed is not None:
        words_of_it.append(
            tr("{name} is the smallest module with equal inputs and other outputs", name=blamed.name)
        )
        constants = tr("its constants (epsilon, scale) or its kernels")
        causes.append(listed((_pass(blamed), constants), ": "))
    else:
        causes.append(tr("{computed}, or what is computed before it", computed=_pass(seen)))
    if seen.later:
        causes.append(tr("an update before it: optimizer, gradient scaling or learning rate"))
    if modules[0].step > 1:
        causes.append(
            tr("the weights, if the runs trained on their own up to step {step}", step=modules[0].step)
        )
    return Level("P1", "different", listed(words_of_it, "; "), checks, tuple(causes), evidence)


def _first(seen: Compared) -> str:
    inside = seen.inputs.passed
    return tr(
        "the first difference is in the {side} of {name} at step {step} ({kind}, {size})",
        side=tr("outputs") if inside else tr("inputs"),
        name=seen.name,
        step=seen.step,
        kind=_PLURAL[seen.kind],
        size=_size(seen.outputs if inside else seen.inputs),
    )


def _apis(findings: _Findings) -> Level:
    if findings.premise is not None:
        return Level("P0", "cannot tell", listed((findings.premise, _SAME_INPUT), ": "), evidence=_DUMPED)
    apis = findings.of(modules=False)
    if not apis:
        return not_run("P0", tr("the dumps have no APIs in common; dump with level L1 or mix"))
    blamed = [api for api in apis if api.is_to_blame]
    checks = tuple(_checks(apis))
    alone = (
        [tr("{count} calls are made by one run only", count=findings.one_sided)] if findings.one_sided else []
    )
    if not blamed:
        agree = tr(
            "{apis} give, for equal inputs, outputs whose statistics agree up to rounding",
            apis=_what(apis, tr("APIs")),
        )
        limits = tr("{limits}, and {no_oracle}", limits=_LIMITS, no_oracle=_NO_ORACLE)
        return Level("P0", "same", listed((agree, *alone, limits), "; "), checks, evidence=_DUMPED)
    first = blamed[0]
    words = [
        tr(
            "{name} gets equal inputs at step {step}, and {wrong}",
            name=first.name,
            step=first.step,
            wrong=_wrong(first),
        )
    ]
    if len(blamed) > 1:
        words.append(tr("more such calls: {count}", count=len(blamed) - 1))
    names = dict.fromkeys(listed((_pass(call), _wrong(call)), ": ") for call in blamed)
    unsure = tr("{no_oracle}, so it does not say which of the two is right", no_oracle=_NO_ORACLE)
    sentence = listed([*words, *alone, unsure], "; ")
    return Level("P0", "different", sentence, checks, tuple(names)[:_NAMED], _DUMPED)


_DUMPED: dict[str, Any] = {"dump": True}


def _what(calls: Sequence[Compared], what: str) -> str:
    names = len({call.call.what for call in calls})
    steps = len({call.step for call in calls})
    if steps > 1:
        return tr(
            "{names} {what} in {calls} calls of {steps} steps",
            names=names,
            what=what,
            calls=len(calls),
            steps=steps,
        )
    return tr("{names} {what} in {calls} calls of 1 step", names=names, what=what, calls=len(calls))


def _wrong(compared: Compared) -> str:
    if compared.constants:
        return listed(compared.constants, "; ")
    return tr("its outputs differ ({size})", size=_size(compared.outputs))


def _pass(compared: Compared) -> str:
    if compared.call.direction == "forward":
        return tr("the forward of {name}", name=compared.name)
    return tr("the backward of {name}", name=compared.name)


def _checks(calls: Sequence[Compared]) -> Iterator[Check]:
    for kind in dict.fromkeys(call.kind for call in calls):
        closest = max((call for call in calls if call.kind == kind), key=lambda call: call.outputs.excess)
        rated, note = closest.outputs, tr("{name} at step {step}", name=closest.name, step=closest.step)
        if rated is not AGREES:
            what = tr("{kind}: {statistic}", kind=_PLURAL[kind], statistic=rated.statistic)
            yield Check(what, rated.error, rated.limit, rated.passed, note)


def _layer(compared: Compared) -> dict[str, Any]:
    place = {"step": compared.step, "kind": compared.kind, "name": compared.name}
    return {**place, "error": compared.outputs.error, "limit": compared.outputs.limit}
