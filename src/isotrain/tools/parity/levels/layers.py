"""The level of forced steps: the first layer in which two runs with the same weights and data differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isotrain.language import listed, tr
from isotrain.tools.parity.levels.anchors import anchor_checks
from isotrain.tools.parity.levels.layer_errors import (
    ALL,
    DIFFERENT,
    NOT_A_NUMBER,
    SAME,
    Difference,
    LayerLimits,
    LayerRating,
    common,
    common_factor,
    differences,
    drift_after,
)
from isotrain.tools.parity.levels.level import Check, Level, not_run
from isotrain.tools.parity.levels.routes import Flips, StepRoutes, open_routes, other_width
from isotrain.tools.parity.levels.score_tests import score_tests
from isotrain.tools.parity.levels.updates import wrong_updates
from isotrain.tools.parity.read.layer_trace import KINDS, TraceEntry, Update, read_layer_trace
from isotrain.tools.parity.run import ROLES, RunLog, section

LEVEL = "P1"
TRUTH = "truth"
"""Directory of a run that has its step in float64: `isotrain parity truth` writes it."""
Updates = Mapping[int, Update]

_PLURAL = {
    "weight": tr("weights"),
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
"""Causes of a difference in the data, which is compared before any number."""
_LOSS_CAUSE = tr("the loss: its mask, its scale or its aggregation")
# A factor is common where entries with most of the squared norm have it, each within a share of its distance
# from 1, and where little of the squared differences is left without it.
_ALIKE, _MOST, _LEFT = 0.2, 0.8, 0.5
# Constants that are named in a sentence; the evidence has them all.
_NAMED = 3
_MOST_WRONG = 500


def layers_level(reference: RunLog, candidate: RunLog, noise: Sequence[Path] = (), *, dtype: str) -> Level:
    """From what `observe.layer_trace` recorded in the directories of two runs.

    `noise` are runs of the reference with weights that were changed in their last digits: what they differ
    by is allowed, and with them the limits are tighter than those that hold for every model. Where
    `isotrain parity truth` has been there, each side is held against float64 in the step that it has.
    """
    a, b = read_layer_trace(reference.path), read_layer_trace(candidate.path)
    if why := _obstacle((reference.path, a), (candidate.path, b)):
        return not_run(LEVEL, why)
    if why := _other_layout((reference, a), (candidate, b)):
        return not_run(LEVEL, why)
    truths = [read_layer_trace(run.path / TRUTH) for run in (reference, candidate)]
    if why := _other_truth(truths, a, b):
        return not_run(LEVEL, why)
    steps = [StepRoutes(s, a[s], b[s], tuple(t[s] for t in truths if s in t)) for s in _steps(a, b)]
    known = _largest_noise(a, [read_layer_trace(path) for path in noise])
    known_values, anchor_failures = anchor_checks(reference, candidate)
    by_truth = {rating.difference.key: rating for step in steps for rating in step.ratings(dtype)}
    limits = LayerLimits(dtype, known, {key[1:]: rating.honest for key, rating in by_truth.items()})
    kept = (d for d in _all_differences(a, b) if d.key in by_truth or _keeps(steps, d))
    rated = [by_truth.get(each.key) or limits.rate(each) for each in kept]
    flips = list(_flips(steps, by_truth, dtype))
    checks = (*_kind_checks(rated), *known_values)
    first = next((number for number, rating in enumerate(rated) if not rating.passed), None)
    evidence: dict[str, Any] = {
        "layers": [_as_json(rating) for rating in rated if rating.difference.kind != "data"],
        "first": None if first is None else _as_json(rated[first]),
    }
    held = dtype if by_truth and all(step.held for step in steps if step.truths) else None
    routes = [other_width(steps), *(flip.words for flip in flips if flip.state == "different")]
    constants = score_tests(reference.path, candidate.path)
    if constants is not None:
        evidence["constants"] = constants.as_json()
    evidence["routes"] = [flip.as_json() for flip in flips if flip.count or flip.state != "same"]
    named = [words for words in routes if words is not None][:_NAMED]
    named += [constant.words for constant in constants.different[:_NAMED]] if constants is not None else []
    wrong = [update.words for update in wrong_updates(a, b)]
    evidence["wrong updates"] = wrong[:_MOST_WRONG]
    named += wrong[:1]
    if first is not None:
        first_difference = _First(rated, first, a, b)
        words = listed([first_difference.words(), *named], "; ")
        return Level(LEVEL, "different", words, checks, (*named, *first_difference.causes()), evidence, held)
    if named:
        words = tr("the layers agree up to rounding, but not all else: {named}", named=listed(named, "; "))
        return Level(LEVEL, "different", words, checks, tuple(named), evidence, held)
    if anchor_failures:
        words = tr(
            "the first step is not what it must be by definition: {failures}",
            failures=listed(anchor_failures, "; "),
        )
        return Level(LEVEL, "different", words, checks, (_LOSS_CAUSE,), evidence, held)
    if unheld := open_routes(steps, flips):
        return Level(LEVEL, "cannot tell", unheld, checks, (), evidence, held)
    between = next((rating for rating in rated if rating.by_truth and rating.z > SAME), None)
    if between is not None:
        words = tr(
            "one run is further from float64 than the other, and not clearly wrong: {place}",
            place=_place(between),
        )
        return Level(LEVEL, "cannot tell", words, checks, (), evidence, held)
    far = next((rating for rating in rated if rating.by_truth and limits.is_far(rating)), None)
    if far is not None:
        words = tr(
            "both runs are further from float64 than rounding explains: {place}; is the truth of this model, "
            "and are both runs right?",
            place=_place(far),
        )
        return Level(LEVEL, "cannot tell", words, checks, (), evidence, held)
    if not _has_gradients(a, b):
        words = tr("no recorded step has a gradient, and its backward shows nothing: are all rewards equal?")
        return Level(LEVEL, "cannot tell", words, checks, (), evidence, held)
    return Level(LEVEL, "same", _agreement(rated, steps), checks, (), evidence, held)


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


def _other_truth(truths: Sequence[Updates], a: Updates, b: Updates) -> str | None:
    """Why a recorded truth is none of these runs' steps."""
    if len({update.model for truth in truths for update in truth.values() if update.routes}) > 1:
        return tr(
            "the two truths are of other models: make the candidate's from the reference, with "
            "`isotrain parity truth REFERENCE --routes CANDIDATE`"
        )
    for step, update in (item for truth in truths for item in truth.items()):
        if step not in a or step not in b:
            return tr("the truth is of step {step}, which not both runs recorded", step=step)
        # Of a candidate with other data, those are what is to be told.
        if all(update.digests != side[step].digests for side in (a, b)):
            return tr("the truth is of other data than the runs; run `isotrain parity truth` again")
    return None


def _other_layout(*runs: tuple[RunLog, Updates]) -> str | None:
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
    reference, candidate = (update.kinds.get("activation", {}) for update in (a, b))
    return all(reference[name].shapes == candidate[name].shapes for name in reference if name in candidate)


def _has_gradients(a: Updates, b: Updates) -> bool:
    """Whether any step trained anything; of a trace without parameters that is not known."""
    both = [side[step].kinds.get("parameter gradient", {}) for side in (a, b) for step in _steps(a, b)]
    return not any(both) or any(entry.norm > 0 for entries in both for entry in entries.values())


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


def _keeps(steps: Sequence[StepRoutes], difference: Difference) -> bool:
    return next(step for step in steps if step.step == difference.step).keeps(difference)


def _flips(
    steps: Sequence[StepRoutes], by_truth: Mapping[tuple[int, str, str], LayerRating], dtype: str
) -> Iterator[Flips]:
    for step in steps:
        yield from step.flips({key[1:]: r for key, r in by_truth.items() if key[0] == step.step}, dtype)


def _largest_noise(reference: Updates, noise: Sequence[Updates]) -> dict[tuple[int, str, str], Difference]:
    """Largest difference of each entry over the noisy runs; what is no number there allows nothing."""
    largest: dict[tuple[int, str, str], Difference] = {}
    for run in noise:
        steps = [StepRoutes(step, reference[step], run[step]) for step in _steps(reference, run)]
        for difference in _all_differences(reference, run):
            if not _keeps(steps, difference):
                continue
            before = largest.get(difference.key, difference)
            if difference.error < NOT_A_NUMBER:
                bulk = max(difference.bulk or 0.0, before.bulk or 0.0)
                largest[difference.key] = replace(
                    difference, error=max(difference.error, before.error), bulk=bulk
                )
    return largest


def _kind_checks(rated: Sequence[LayerRating]) -> Iterator[Check]:
    """The entry of each kind that comes closest to its limit."""
    for kind in dict.fromkeys(rating.difference.kind for rating in rated):
        of_kind = [rating for rating in rated if rating.difference.kind == kind]
        worst = max(of_kind, key=lambda rating: rating.error / rating.limit)
        difference = worst.difference
        note = tr(
            "{name} at step {step}, of {count}",
            name=difference.name,
            step=difference.step,
            count=len(of_kind),
        )
        called = _PLURAL.get(kind, kind)
        if worst.by_truth:
            passed = None if SAME < worst.z <= DIFFERENT else worst.passed
            yield Check(tr("{kind}: z against float64", kind=called), worst.z, DIFFERENT, passed, note)
        else:
            yield Check(tr("{kind}: error", kind=called), worst.error, worst.limit, worst.passed, note)


def _agreement(rated: Sequence[LayerRating], routed: Sequence[StepRoutes]) -> str:
    against = [rating for rating in rated if rating.by_truth]
    if against:
        words = tr(
            "against float64, all {count} entries of step {step} are as near in one run as in the other; "
            "furthest {place}",
            count=len(against),
            step=against[0].difference.step,
            place=_place(max(against, key=lambda rating: rating.z)),
        )
        apart = next((step.step for step in routed if step.apart is not None), None)
        if apart is None:
            return words
        return tr(
            "{words}; at step {apart} tokens go to other experts, and the layers after them are not compared "
            "between the runs",
            words=words,
            apart=apart,
        )
    rated = [rating for rating in rated if rating.difference.kind != "weight"]
    closest = max(rated, key=lambda rating: rating.error / rating.limit)
    steps_seen = {rating.difference.step for rating in rated}
    steps, first = len(steps_seen), min(steps_seen)
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


def _place(rating: LayerRating) -> str:
    difference = rating.difference
    if difference.kind == "loss":
        return tr("is the loss at step {step} ({size})", step=difference.step, size=_size(rating))
    return tr(
        "are the {kind} of {name} at step {step} ({size})",
        kind=_PLURAL[difference.kind],
        name=difference.name,
        step=difference.step,
        size=_size(rating),
    )


def _size(rating: LayerRating) -> str:
    if rating.error >= NOT_A_NUMBER:
        return tr("no numbers, or of another shape")
    if rating.by_truth:
        return tr(
            "the {role} is {error:.1e} from float64, z = {z:.3g}, right up to {same:g}, wrong beyond "
            "{different:g}",
            role=ROLES[rating.role],
            error=rating.error,
            z=rating.z,
            same=SAME,
            different=DIFFERENT,
        )
    return tr("{error:.1e} against at most {limit:.0e}", error=rating.error, limit=rating.limit)


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

    rated: Sequence[LayerRating]
    number: int
    a: Updates
    b: Updates

    @property
    def rating(self) -> LayerRating:
        return self.rated[self.number]

    @property
    def before(self) -> str | None:
        """The entry of the same kind and step that was computed just before."""
        difference = self.rating.difference
        earlier = self.rated[self.number - 1].difference if self.number else None
        alike = earlier is not None and (earlier.step, earlier.kind) == (difference.step, difference.kind)
        return earlier.name if earlier is not None and alike else None

    def words(self) -> str:
        difference, rating = self.rating.difference, self.rating
        if difference.kind == "data":
            return _other_data(difference.name, difference.step)
        sentence = tr(
            "the first difference is in the {kind} of {name} at step {step} ({size})",
            kind=_PLURAL[difference.kind],
            name=difference.name,
            step=difference.step,
            size=_size(rating),
        )
        if difference.kind == "loss":
            sentence = tr(
                "the first difference is in the loss at step {step} ({size})",
                step=difference.step,
                size=_size(rating),
            )
        factor = self.factor()
        if factor is None:
            return sentence
        return tr("{told}: each is {factor:.3f} times the reference's", told=sentence, factor=factor)

    def factor(self) -> float | None:
        """By which all entries of this kind and step differ alike; None where they do not."""
        difference = self.rating.difference
        if difference.kind not in ("gradient", "parameter gradient", "update"):
            return None
        both = common(self.a[difference.step], self.b[difference.step], difference.kind)
        factor = common_factor(both)
        size = next(
            rating
            for rating in self.rated
            if rating.difference.key == (difference.step, difference.kind, ALL)
        )
        alike = not size.passed and math.isfinite(factor) and _is_common(factor, both)
        # Updates keep their size where a gradient changes its sign, and their direction does not.
        return factor if alike and (difference.kind == "update" or _explains(factor, both)) else None

    def causes(self) -> tuple[str, ...]:
        difference = self.rating.difference
        if difference.kind == "data":
            return (_DATA[difference.name],)
        causes = self._of_kind(difference)
        # All that goes from one update to the next is weights, moments and the schedule.
        later = difference.step > _steps(self.a, self.b)[0]
        return (tr("optimizer state or schedule"), *causes) if later else causes

    def _of_kind(self, difference: Difference) -> tuple[str, ...]:
        match difference.kind:
            case "weight":
                return (
                    tr(
                        "the weights of {name} that the step began with: how they were loaded or converted",
                        name=difference.name,
                    ),
                )
            case "activation":
                layer = tr(
                    "layer {name}: its weights, its constants (epsilon, scale) or its kernel",
                    name=difference.name,
                )
                if not self.before:
                    return (layer,)
                return layer, tr("what is computed between {before} and it", before=self.before)
            case "loss":
                return (_LOSS_CAUSE,)
            case "gradient":
                if self.before is None or difference.name == ALL:
                    return (_LOSS_CAUSE,)
                return (
                    tr(
                        "the backward of {before}, or of what is between it and {name}",
                        before=self.before,
                        name=difference.name,
                    ),
                )
            case "parameter gradient":
                if difference.name == ALL or self.factor() is not None:
                    return (self._times(tr("gradient scaling (accumulation, ranks, clipping)")),)
                module = difference.name.rpartition(".")[0] or difference.name
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


def _is_common(factor: float, entries: Mapping[str, tuple[TraceEntry, TraceEntry]]) -> bool:
    """Whether the entries that make up most of the kind's norm differ by this factor, each for itself."""
    near = [
        a for a, b in entries.values() if abs(b.norm - factor * a.norm) <= _ALIKE * abs(factor - 1) * a.norm
    ]
    return sum(a.norm * a.norm for a in near) >= _MOST * sum(a.norm * a.norm for a, _ in entries.values())


def _explains(factor: float, entries: Mapping[str, tuple[TraceEntry, TraceEntry]]) -> bool:
    """Whether little is left of the differences once the reference is scaled by the factor."""
    left, whole = (
        sum(float(((b.sketches_RKK - scale * a.sketches_RKK) ** 2).sum()) for a, b in entries.values())
        for scale in (factor, 1.0)
    )
    return left < _LEFT * whole


def _as_json(rating: LayerRating) -> dict[str, Any]:
    difference = rating.difference
    place = {"step": difference.step, "kind": difference.kind, "name": difference.name}
    against = {"role": rating.role, "other": rating.other, "z": rating.z} if rating.by_truth else {}
    return {**place, "error": rating.error, "limit": rating.limit, **against}
