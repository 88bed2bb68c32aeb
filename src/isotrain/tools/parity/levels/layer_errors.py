"""How far each layer of a recorded update is from the same layer of another run, beside how far it may be.

R: ranks, K: buckets of a sketch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from isotrain.errors import DataError
from isotrain.language import tr
from isotrain.tools.parity.read.layer_trace import KINDS, TraceEntry, Update

ALL = tr("all of them")
"""The name under which the common size of a kind's entries is compared."""

# Of a rounding: the distance from 1 to the next number.
_EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# What honest pairs were measured at on tiny models of up to 12 layers (same code on two devices, fused and
# plain operators, weights changed in their last digits) is at most a quarter of each of these limits. Only
# updates of a few elements come closer in bfloat16: a quarter of the changed signs is half of the error.
_ACTIVATION = {"float32": 64, "float16": 8, "bfloat16": 8}
_GRADIENT = 2
_LOSS = 1 / 8
_SIZE = {"float32": 64, "float16": 4, "bfloat16": 4}
_UPDATE_SIZE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 2e-3}
_DEPTH = 64
"""Entries after which an error's variance may have doubled: roundings of layers add up as random steps do."""
_WEIGHT = 1e-5
"""Of a parameter's norm: the last digits of its numbers change it by less."""
_DRIFT = 12
_SIGN_CHANGES = 3
"""Times two over the root of a parameter's size: so much of its update a few changed signs may make."""
_NOISE = 8
# Last digits of float32 weights say little of what bfloat16 rounds away: there, noise only widens limits.
_FLOOR = {"float32": 1 / 8, "float16": 1.0, "bfloat16": 1.0}
# From the median of sizes to their root mean square, for normal numbers.
_MEDIAN_TO_ROOT_MEAN_SQUARE = 1.4826
NOT_A_NUMBER = 1e300

SAME, DIFFERENT = 4.0, 8.0
"""How many times as far from the truth as the other a side may be, and where it is wrong. Over kernels of
three instruction sets and other orders of summation, honest sides were at most at 2.3 (docs/parity.md)."""
FAR = 32.0
"""Times the limit for two runs: a truth that is further from both is of another model, or both are wrong.
In float32, honest runs of SmolLM2 were at most at 16, an attention scale 0.2 % off is at 122."""
_ROUNDING = 0.25
"""Of a number rounded once, in the distance from 1 to the next number: root mean square of its error."""


@dataclass(frozen=True)
class Difference:
    """One layer's error in one update; `error` is of its norm, and beyond every limit if not finite."""

    step: int
    kind: str
    name: str
    error: float
    position: int = 0
    """Entries that were computed before it in the same update."""
    bulk: float | None = None
    """For an update: the error without what a few elements make."""
    elements: int = 0
    factor: float = 1.0
    """The candidate's norm over the reference's."""
    grain: float = 0.0
    """For an update: the last digit of the weights, as a share of the update's norm."""
    drift: float = 0.0
    """How far earlier updates have moved the weights apart, of their norm."""

    @property
    def key(self) -> tuple[int, str, str]:
        return self.step, self.kind, self.name


@dataclass(frozen=True)
class LayerRating:
    """A difference with the limit that it is closest to, or beyond."""

    difference: Difference
    error: float
    limit: float
    other: float | None = None
    """Against the truth: how far the nearer run is from it; `error` is how far the other is."""
    role: Literal["reference", "candidate"] = "candidate"
    """The run that `error` is of."""

    @property
    def passed(self) -> bool:
        return self.error <= self.limit

    @property
    def by_truth(self) -> bool:
        return self.other is not None

    @property
    def z(self) -> float:
        """How many times as far from the truth as the other run is, or as rounding alone explains."""
        return DIFFERENT * self.error / self.limit

    @property
    def honest(self) -> float:
        """How far another right run may be from this truth."""
        return max(self.limit, DIFFERENT * self.error) if self.role == "reference" else self.limit


@dataclass(frozen=True)
class LayerLimits:
    dtype: str
    noise: Mapping[tuple[int, str, str], Difference] = field(default_factory=dict)
    """The largest differences of runs that are known to be the same training."""
    honest: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By kind and name: how far two sides may be apart that are both as near the truth as they must be."""

    def __post_init__(self) -> None:
        if self.dtype not in _EPSILON:
            raise DataError(f"limits are known for {', '.join(_EPSILON)}, not for '{self.dtype}'")

    def rate(self, difference: Difference) -> LayerRating:
        noise = self.noise.get(difference.key)
        pairs = [
            (
                difference.error,
                self._limit(difference, self._plain(difference), noise.error if noise else None),
            )
        ]
        if difference.bulk is not None:
            bulk = noise.bulk if noise else None
            pairs.append((difference.bulk, self._limit(difference, self._update(difference), bulk)))
        error, limit = max(pairs, key=lambda pair: pair[0] / pair[1])
        return LayerRating(difference, error, limit)

    def is_far(self, rating: LayerRating) -> bool:
        """Whether a run is further from its truth than rounding explains, however far the other one is."""
        return rating.error > FAR * self._plain(rating.difference)

    def _limit(self, difference: Difference, plain: float, noise: float | None) -> float:
        if difference.name == ALL and difference.kind == "update":
            return plain  # sizes of updates do not follow the weights
        if noise is not None and difference.name != ALL:
            plain = max(_NOISE * noise, _FLOOR[self.dtype] * plain)
        plain = max(plain, self.honest.get((difference.kind, difference.name), 0.0))
        return plain + difference.grain + _DRIFT * difference.drift

    def _plain(self, difference: Difference) -> float:
        epsilon = _EPSILON[self.dtype]
        if difference.kind == "weight":
            return _WEIGHT
        if difference.name == ALL:
            return _UPDATE_SIZE[self.dtype] if difference.kind == "update" else _SIZE[self.dtype] * epsilon
        if difference.kind == "update":
            # Adam's first update is little more than the gradient's sign.
            return max(self._update(difference), _SIGN_CHANGES * 2 / math.sqrt(max(1, difference.elements)))
        part = {"activation": 1.0, "loss": _LOSS}.get(difference.kind, _GRADIENT)
        return part * _ACTIVATION[self.dtype] * epsilon * math.sqrt(1 + difference.position / _DEPTH)

    def _update(self, difference: Difference) -> float:
        """Where gradients may be off by a share, about that share of their signs may change."""
        gradient = _GRADIENT * _ACTIVATION[self.dtype] * _EPSILON[self.dtype]
        return min(1.0, 2 * math.sqrt(gradient * math.sqrt(1 + difference.position / _DEPTH)))


def differences(step: int, reference: Update, candidate: Update, drift: float = 0.0) -> Iterator[Difference]:
    """Differences of entries that both runs have, as they were computed; sizes of all come after each kind.

    First of all, the norms of the parameters that the update found.

    `drift` is what `drift_after` has found for the updates before.
    """
    position = 0
    for name, (a, b) in common(reference, candidate, "update").items():
        if a.weight_norm or b.weight_norm:
            factor = _share(b.weight_norm, a.weight_norm)
            yield Difference(step, "weight", name, _finite(abs(factor - 1)), factor=factor, drift=drift)
    for kind in KINDS:
        both = common(reference, candidate, kind)
        for name, (a, b) in both.items():
            yield _difference(step, kind, name, a, b, position, drift)
            position += kind in ("activation", "gradient")
        if kind == "activation":
            error = _finite(abs(candidate.loss - reference.loss) / max(1.0, abs(reference.loss)))
            yield Difference(step, "loss", "loss", error, position, drift=drift)
        elif both:
            factor = common_factor(both)
            yield Difference(step, kind, ALL, _finite(abs(factor - 1)), position, factor=factor, drift=drift)


def against_truth(
    step: int, reference: Update, candidate: Update, truths: tuple[Update, Update], dtype: str
) -> Iterator[LayerRating]:
    """The distance from the truth of the run that is further, beside the other's, of entries of all three.

    Either run may be the wrong one. The other may be close by chance: what one rounding in each operator
    before it explains counts as well. Runs of a mixture have a truth each, in which tokens take their routes.
    """
    theirs = {difference.key: difference for difference in differences(step, truths[0], reference)}
    for ours in differences(step, truths[1], candidate):
        if (of_reference := theirs.get(ours.key)) is None:
            continue
        role: Literal["reference", "candidate"] = "candidate"
        further, nearer, near_run, truth = ours, of_reference, reference, truths[0]
        if of_reference.error > ours.error:
            role, further, nearer = "reference", of_reference, ours
            near_run, truth = candidate, truths[1]
        expected = max(nearer.error, expected_rounding(dtype, further.position))
        if further.name == ALL:
            # A common factor is no further from 1 than all entries together are from the truth.
            expected = max(expected, _distance_of_all(truth, near_run, further.kind))
        # What is no number explains nothing.
        if nearer.error >= NOT_A_NUMBER:
            expected = _EPSILON[dtype]
        yield LayerRating(further, further.error, DIFFERENT * expected, nearer.error, role)


def expected_rounding(dtype: str, position: int) -> float:
    """What one rounding in each operator before an entry makes, of its norm."""
    return _ROUNDING * _EPSILON[dtype] * math.sqrt(1 + position)


def _distance_of_all(truth: Update, side: Update, kind: str) -> float:
    pairs = [(a, b) for a, b in common(truth, side, kind).values() if a.shapes == b.shapes]
    apart = _share(math.hypot(*(_distance(a, b) for a, b in pairs)), math.hypot(*(a.norm for a, _ in pairs)))
    return apart if math.isfinite(apart) else 0.0


def drift_after(reference: Update, candidate: Update) -> float:
    """By how much one update moves the weights of two runs apart: the largest share of a parameter's norm."""
    shares = [
        # A parameter that was 0, as an adapter's second half, is what the update makes of it.
        _share(_distance(a, b), max(a.weight_norm, a.norm))
        for a, b in common(reference, candidate, "update").values()
        if a.sketches_RKK.shape == b.sketches_RKK.shape
    ]
    # What is not a number is told as an error of the update; it is no excuse for what comes after.
    return max((share for share in shares if math.isfinite(share)), default=0.0)


def common(reference: Update, candidate: Update, kind: str) -> dict[str, tuple[TraceEntry, TraceEntry]]:
    """Fused operators leave some inner layers out, so each run may have some of its own."""
    others = candidate.kinds[kind]
    return {name: (entry, others[name]) for name, entry in reference.kinds[kind].items() if name in others}


def common_factor(entries: Mapping[str, tuple[TraceEntry, TraceEntry]]) -> float:
    a, b = (math.hypot(*(pair[side].norm for pair in entries.values())) for side in (0, 1))
    return b / a if a else (1.0 if b == a else math.inf)


def _difference(
    step: int, kind: str, name: str, a: TraceEntry, b: TraceEntry, position: int, drift: float
) -> Difference:
    if a.shapes != b.shapes or a.sketches_RKK.shape != b.sketches_RKK.shape:
        return Difference(step, kind, name, NOT_A_NUMBER, position)
    error = _finite(_share(_distance(a, b), a.norm))
    factor = _share(b.norm, a.norm) if a.norm or b.norm else 1.0
    bulk, grain = None, 0.0
    if kind == "update":
        bulk, grain = _finite(_share(_bulk(a, b), a.norm)), _grain(a)
    return Difference(step, kind, name, error, position, bulk, a.size, factor, grain, drift)


def _grain(a: TraceEntry) -> float:
    """Weights are kept in float32, whatever the layers compute in; what is no number excuses nothing."""
    grain = _EPSILON["float32"] * _share(a.weight_norm, a.norm)
    return grain if math.isfinite(grain) else 0.0


def _distance(a: TraceEntry, b: TraceEntry) -> float:
    return float(np.linalg.norm(a.sketches_RKK - b.sketches_RKK))


def _bulk(a: TraceEntry, b: TraceEntry) -> float:
    """The distance as most buckets tell it: a changed sign is in one of them."""
    used_RKK = (a.sketches_RKK != 0) | (b.sketches_RKK != 0)
    apart = np.abs(a.sketches_RKK - b.sketches_RKK)[used_RKK]
    if not len(apart):
        return 0.0
    return _MEDIAN_TO_ROOT_MEAN_SQUARE * float(np.median(apart)) * math.sqrt(len(apart))


def _share(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return 0.0 if part == 0 else math.inf


def _finite(error: float) -> float:
    return error if math.isfinite(error) else NOT_A_NUMBER
