"""The level of forced steps: the first layer in which two runs with the same weights and data differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isotrain.language import listed, tr
from isotrain.parity.anchors import anchors
from isotrain.parity.layer_errors import (
    ALL,
    NOT_A_NUMBER,
    Difference,
    Limits,
    Rated,
    common,
    common_factor,
    differences,
    drift_after,
)
from isotrain.parity.levels import Check, Level, not_run
from isotrain.parity.run import Run, section
from isotrain.parity.score_tests import score_tests
from isotrain.parity.sources.layer_trace import KINDS, Entry, Update, read_layer_trace

LEVEL = "P1"
Updates = Mapping[int, Update]

_PLURAL = {
    "loss": tr("loss"),
    "activation": tr("activations"),
    "gradient": tr("gradients"),
    "parameter gradient": tr("parameter gradients"),
    "update": tr("updates"),
}
assert set(KINDS) <= set(_PLURAL)
_DATA = {
    "tokens": tr("data order, chat template or tokenizer"),
    "packing": tr("the size of micro-batches, or the splitting over ranks"),
    "loss": tr("the loss mask"),
}
"""What is compared before any number is, and what is behind a difference of it."""
_LOSS_CAUSE = tr("the loss: its mask, its scale or its aggregation")
# A factor is common where entries with most of the squared norm have it, each within a share of its distance
# from 1, and where little of the squared differences is left without it.
_ALIKE, _MOST, _LEFT = 0.2, 0.8, 0.5
# Constants that are named in a sentence; the evidence has them all.
_NAMED = 3


def layers_level(reference: Run, candidate: Run, noise: Sequence[Path] = (), *, dtype: str) -> Level:
    """From what `observe.layer_trace` recorded in the directories of two runs.

    `noise` are runs of the reference with weights that were changed in their last digits: what they differ
    by is allowed, and with them the limits are tighter than those that hold for every model.
    """
    a, b = read_layer_trace(reference.path), read_layer_trace(candidate.path)
    if why := _obstacle((reference.path, a), (candidate.path, b)):
        return not_run(LEVEL, why)
    if why := _other_layout((reference, a), (candidate, b)):
        return not_run(LEVEL, why)
    known = _largest_noise(a, [read_layer_trace(path) for path in noise])
    told, anchor_failures = _anchor_checks(reference, candidate)
    limits = Limits(dtype, known)
    rated = [limits.rate(found) for found in _all_differences(a, b)]
    checks = (*_kind_checks(rated), *told)
    first = next((number for number, one in enumerate(rated) if not one.passed), None)
    evidence = {
        "layers": [_as_json(one) for one in rated if one.difference.kind != "data"],
        "first": None if first is None else _as_json(rated[first]),
    }
    constants = score_tests(reference.path, candidate.path)
    if constants is not None:
        evidence["constants"] = constants.as_json()
    named = [one.words for one in constants.different[:_NAMED]] if constants is not None else []
    if first is not None:
        found = _First(rated, first, a, b)
        words = listed([found.words(), *named], "; ")
        return Level(LEVEL, "different", words, checks, (*named, *found.causes()), evidence)
    if named:
        words = tr(
            "the layers agree up to rounding, but not their constants: {named}", named=listed(named, "; ")
        )
        return Level(LEVEL, "different", words, checks, tuple(named), evidence)
    if anchor_failures:
        words = tr(
            "the first step is not what it must be by definition: {failures}",
            failures=listed(anchor_failures, "; "),
        )
        return Level(LEVEL, "different", words, checks, (_LOSS_CAUSE,), evidence)
    return Level(LEVEL, "same", _agreement(rated), checks, (), evidence)


def _obstacle(*runs: tuple[Path, Updates]) -> str | None:
    """Why the layers of two runs cannot be compared."""
    for path, updates in runs:
        if not updates:
            return tr(
                "no layers were recorded in {path}; train both runs with observe.layer_trace=2", path=path
            )
    (_, a), (_, b) = runs
    if not set(a) & set(b):
        return tr("the runs recorded no common step; train both with the same observe.layer_trace")
    ranks = [len(next(iter(updates.values())).digests) for updates in (a, b)]
    if ranks[0] != ranks[1]:
        return tr(
            "{one} and {other} ranks compute other parts of a batch; train both on equally many",
            one=ranks[0],
            other=ranks[1],
        )
    first = min(set(a) & set(b))
    if not any(common(a[first], b[first], kind) for kind in KINDS):
        return tr("the runs have no layer in common; are they the same model?")
    return None


def _other_layout(*runs: tuple[Run, Updates]) -> str | None:
    """Attention that pads, or reads a shared prompt once per response: no layer sees the same input."""
    ways = [str(section(run.environment, "model").get("attention", "unknown")) for run, _ in runs]
    first = [updates[min(updates)] for _, updates in runs]
    same_tokens = _digests(first[0], "tokens") == _digests(first[1], "tokens")
    if ways[0] == ways[1] or (same_tokens and _same_shapes(*first)):
        return None
    return tr(
        "attention is computed in other ways ({one} and {other}), which lay tokens out otherwise; train both "
        "with the same model.attention",
        one=ways[0],
        other=ways[1],
    )


def _same_shapes(a: Update, b: Update) -> bool:
    one, other = (update.kinds.get("activation", {}) for update in (a, b))
    return all(one[name].shapes == other[name].shapes for name in one if name in other)


def _steps(a: Updates, b: Updates) -> list[int]:
    return sorted(set(a) & set(b))


def _digests(update: Update, name: str) -> list[str]:
    return [digests[name] for digests in update.digests]


def _all_differences(a: Updates, b: Updates) -> Iterator[Difference]:
    drift = 0.0
    for step in _steps(a, b):
        for name in _DATA:
            if _digests(a[step], name) != _digests(b[step], name):
                # From here on there are other numbers everywhere, and no layer is to blame.
                yield Difference(step, "data", name, NOT_A_NUMBER)
                return
        yield from differences(step, a[step], b[step], drift)
        drift += drift_after(a[step], b[step])


def _largest_noise(reference: Updates, noise: Sequence[Updates]) -> dict[tuple[int, str, str], Difference]:
    """Of each entry, that of the noisiest run; what is no number there allows nothing."""
    largest: dict[tuple[int, str, str], Difference] = {}
    for run in noise:
        for found in _all_differences(reference, run):
            before = largest.get(found.key, found)
            if found.error < NOT_A_NUMBER:
                bulk = max(found.bulk or 0.0, before.bulk or 0.0)
                largest[found.key] = replace(found, error=max(found.error, before.error), bulk=bulk)
    return largest


def _anchor_checks(reference: Run, candidate: Run) -> tuple[tuple[Check, ...], list[str]]:
    """Anchors of the candidate, and those that only the candidate misses."""
    expected, found = anchors(reference), anchors(candidate)
    missed_by_both = {check.name for check in expected if not check.passed}
    failed = [check for check in found if not check.passed and check.name not in missed_by_both]
    return found, [listed((check.name, check.note), ": ") for check in failed]


def _kind_checks(rated: Sequence[Rated]) -> Iterator[Check]:
    """The entry of each kind that comes closest to its limit."""
    for kind in dict.fromkeys(one.difference.kind for one in rated):
        own = [one for one in rated if one.difference.kind == kind]
        worst = max(own, key=lambda one: one.error / one.limit)
        found = worst.difference
        note = tr("{name} at step {step}, of {count}", name=found.name, step=found.step, count=len(own))
        what = tr("{kind}: error", kind=_PLURAL.get(kind, kind))
        yield Check(what, worst.error, worst.limit, worst.passed, note)


def _agreement(rated: Sequence[Rated]) -> str:
    closest = max(rated, key=lambda one: one.error / one.limit)
    found = {one.difference.step for one in rated}
    steps, first = len(found), min(found)
    forced = tr("{count} forced steps", count=steps) if steps > 1 else tr("1 forced step")
    if first > 1:
        forced = tr("{forced} from step {first} on", forced=forced, first=first)
    return tr(
        "activations, gradients and updates of {forced} agree in all {count} entries; closest to a limit "
        "{place}",
        forced=forced,
        count=len(rated),
        place=_place(closest),
    )


def _place(one: Rated) -> str:
    found = one.difference
    if found.kind == "loss":
        return tr("is the loss at step {step} ({size})", step=found.step, size=_size(one))
    return tr(
        "are the {kind} of {name} at step {step} ({size})",
        kind=_PLURAL[found.kind],
        name=found.name,
        step=found.step,
        size=_size(one),
    )


def _size(one: Rated) -> str:
    if one.error >= NOT_A_NUMBER:
        return tr("no numbers, or of another shape")
    return tr("{error:.1e} against at most {limit:.0e}", error=one.error, limit=one.limit)


def _other_data(name: str, step: int) -> str:
    if name == "tokens":
        return tr("from step {step} on the candidate reads other tokens than the reference", step=step)
    if name == "packing":
        return tr(
            "from step {step} on the candidate packs its samples otherwise than the reference", step=step
        )
    return tr(
        "from step {step} on the candidate takes its loss on other tokens than the reference", step=step
    )


@dataclass(frozen=True)
class _First:
    """The first entry beyond its limit, among all that were rated."""

    rated: Sequence[Rated]
    number: int
    a: Updates
    b: Updates

    @property
    def one(self) -> Rated:
        return self.rated[self.number]

    @property
    def before(self) -> str | None:
        """The entry of the same kind and step that was computed just before."""
        found = self.one.difference
        earlier = self.rated[self.number - 1].difference if self.number else None
        alike = earlier is not None and (earlier.step, earlier.kind) == (found.step, found.kind)
        return earlier.name if earlier is not None and alike else None

    def words(self) -> str:
        found, one = self.one.difference, self.one
        if found.kind == "data":
            return _other_data(found.name, found.step)
        told = tr(
            "the first difference is in the {kind} of {name} at step {step} ({size})",
            kind=_PLURAL[found.kind],
            name=found.name,
            step=found.step,
            size=_size(one),
        )
        if found.kind == "loss":
            told = tr(
                "the first difference is in the loss at step {step} ({size})",
                step=found.step,
                size=_size(one),
            )
        factor = self.factor()
        if factor is None:
            return told
        return tr("{told}: each is {factor:.3f} times the reference's", told=told, factor=factor)

    def factor(self) -> float | None:
        """By which all entries of this kind and step differ alike; None where they do not."""
        found = self.one.difference
        if found.kind not in ("gradient", "parameter gradient", "update"):
            return None
        both = common(self.a[found.step], self.b[found.step], found.kind)
        factor = common_factor(both)
        size = next(one for one in self.rated if one.difference.key == (found.step, found.kind, ALL))
        alike = not size.passed and math.isfinite(factor) and _is_common(factor, both)
        # Updates keep their size where a gradient changes its sign, and their direction does not.
        return factor if alike and (found.kind == "update" or _explains(factor, both)) else None

    def causes(self) -> tuple[str, ...]:
        found = self.one.difference
        if found.kind == "data":
            return (_DATA[found.name],)
        causes = self._of_kind(found)
        # All that goes from one update to the next is weights, moments and the schedule.
        later = found.step > _steps(self.a, self.b)[0]
        return (tr("optimizer state or schedule"), *causes) if later else causes

    def _of_kind(self, found: Difference) -> tuple[str, ...]:
        match found.kind:
            case "activation":
                layer = tr(
                    "layer {name}: its weights, its constants (epsilon, scale) or its kernel", name=found.name
                )
                if not self.before:
                    return (layer,)
                return layer, tr("what is computed between {before} and it", before=self.before)
            case "loss":
                return (_LOSS_CAUSE,)
            case "gradient":
                if self.before is None or found.name == ALL:
                    return (_LOSS_CAUSE,)
                return (
                    tr(
                        "the backward of {before}, or of what is between it and {name}",
                        before=self.before,
                        name=found.name,
                    ),
                )
            case "parameter gradient":
                if found.name == ALL or self.factor() is not None:
                    return (self._times(tr("gradient scaling (accumulation, ranks, clipping)")),)
                module = found.name.rpartition(".")[0] or found.name
                return (
                    tr("the backward of {module}: its weights' gradient", module=module),
                    tr("the sum of gradients over micro-batches or ranks"),
                )
            case _:
                return (self._times(tr("the optimizer: learning rate, moments, weight decay")),)

    def _times(self, cause: str) -> str:
        factor = self.factor()
        if factor is None:
            return cause
        return tr("{cause}, by a factor of {factor:.3f}", cause=cause, factor=factor)


def _is_common(factor: float, entries: Mapping[str, tuple[Entry, Entry]]) -> bool:
    """Whether the entries that make up most of the kind's norm differ by this factor, each for itself."""
    near = [
        a for a, b in entries.values() if abs(b.norm - factor * a.norm) <= _ALIKE * abs(factor - 1) * a.norm
    ]
    return sum(a.norm * a.norm for a in near) >= _MOST * sum(a.norm * a.norm for a, _ in entries.values())


def _explains(factor: float, entries: Mapping[str, tuple[Entry, Entry]]) -> bool:
    """Whether little is left of the differences once the reference is scaled by the factor."""
    left, whole = (
        sum(float(((b.sketches_RKK - scale * a.sketches_RKK) ** 2).sum()) for a, b in entries.values())
        for scale in (factor, 1.0)
    )
    return left < _LEFT * whole


def _as_json(one: Rated) -> dict[str, Any]:
    found = one.difference
    place = {"step": found.step, "kind": found.kind, "name": found.name}
    return {**place, "error": one.error, "limit": one.limit}
