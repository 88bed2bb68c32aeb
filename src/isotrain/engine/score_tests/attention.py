"""Causal attention from its definition, with its slopes by scale, gain and bias.

G: key/value heads, R: query heads of each, Q: queries, K: keys, D: head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from isotrain.engine.score_tests.fit import Array, Fit, fit
from isotrain.engine.score_tests.rounding import rounded

CONSTANTS = ("scale", "gain", "bias")

# With fewer, the spread between them says little: a sample's queries are then cut into parts.
_FEWEST_CLUSTERS = 16


Turned = Callable[[Array, Array, Array], Array]
"""Halves of the last dimension turned against each other by cosines and sines; before it are the tokens."""


def turned_exactly(dtype: str, x: Array, cos_TD: Array, sin_TD: Array) -> Array:
    return x * cos_TD + _across(x) * sin_TD


def turned_and_rounded(dtype: str, x: Array, cos_TD: Array, sin_TD: Array) -> Array:
    """As fused operators do: computed in more digits, kept in `dtype`."""
    return rounded(turned_exactly(dtype, x, cos_TD, sin_TD), dtype)


def turned_in_steps(dtype: str, x: Array, cos_TD: Array, sin_TD: Array) -> Array:
    """As plain operators do: two products and their sum, each in `dtype`."""
    return rounded(rounded(x * cos_TD, dtype) + rounded(_across(x) * sin_TD, dtype), dtype)


def _across(x: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([-second, first], axis=-1)


TURNS = (turned_exactly, turned_and_rounded, turned_in_steps)


@dataclass(frozen=True)
class Sample:
    """Some queries of one sample with all keys that they may see, before they are turned."""

    query_GRQD: Array
    key_GKD: Array
    value_GKD: Array
    query_turn: tuple[Array, Array]
    """Cosines and sines of the queries' positions, `_QD`."""
    key_turn: tuple[Array, Array]
    seen_QK: npt.NDArray[np.bool_]
    observed_GRQD: Array
    turned: Turned

    @cached_property
    def products_GRQK(self) -> Array:
        query_GRQD = self.turned(self.query_GRQD, *self.query_turn)
        key_GKD = self.turned(self.key_GKD, *self.key_turn)
        products: Array = query_GRQD @ key_GKD.swapaxes(-1, -2)[:, None]
        return products

    def attend(self, scale: float) -> tuple[Array, Array]:
        """The output, and its slope by the scale's logarithm."""
        score_GRQK = np.where(self.seen_QK, scale * self.products_GRQK, -np.inf)
        weight_GRQK = np.exp(score_GRQK - score_GRQK.max(-1, keepdims=True))
        weight_GRQK /= weight_GRQK.sum(-1, keepdims=True)
        score_GRQK = np.where(self.seen_QK, score_GRQK, 0.0)
        away_GRQK = score_GRQK - (weight_GRQK * score_GRQK).sum(-1, keepdims=True)
        value_G1KD = self.value_GKD[:, None]
        return weight_GRQK @ value_G1KD, (weight_GRQK * away_GRQK) @ value_G1KD


@dataclass(frozen=True)
class Attention:
    """Scale and gain are off by a share of themselves, the bias by a share of the output's size."""

    samples: Sequence[Sample]
    scale: float

    def __call__(self, off_C: Array) -> tuple[Array, Array]:
        scale_off, gain_off, bias = off_C
        # At 0 the logarithm has no slope; the fit takes such a step back.
        factor = 1 + scale_off or 1e-9
        parts = [sample.attend(self.scale * factor) for sample in self.samples]
        output_N, by_scale_N = (np.concatenate([part[n].reshape(-1) for part in parts]) for n in (0, 1))
        size_N = np.full_like(output_N, self.size)
        slope_NC = np.stack([(1 + gain_off) / factor * by_scale_N, output_N, size_N], -1)
        return (1 + gain_off) * output_N + bias * size_N, slope_NC

    @cached_property
    def size(self) -> float:
        """The values' root mean square."""
        squares = sum(float((sample.value_GKD**2).sum()) for sample in self.samples)
        return math.sqrt(squares / max(1, sum(sample.value_GKD.size for sample in self.samples))) or 1.0


def check_attention(samples: Sequence[Sample], scale: float, dtype: str) -> tuple[Fit, float]:
    """The fit over all samples, and the norm of the error that rounding would make.

    How a kernel rounds what it has turned is not known: the way that fits best is taken. Without it, keys
    that all samples begin with would move the estimate alike in all of them.
    """
    samples = _without_repetitions(samples)
    ways = [
        Attention([replace(sample, turned=partial(way, dtype)) for sample in samples], scale) for way in TURNS
    ]
    observed_N = np.concatenate([sample.observed_GRQD.reshape(-1) for sample in samples])
    cluster_N = np.concatenate(_clusters(samples))

    def best(off_C: Array) -> Attention:
        rests = [float(np.linalg.norm(observed_N - way(off_C)[0])) for way in ways]
        return ways[rests.index(min(rests))]

    attention = best(np.zeros(3))
    found = fit(attention, observed_N, cluster_N, np.zeros(3))
    # A wrong constant hides how it was rounded: only beside the fitted one can that be seen.
    again = best(np.array([one.off for one in found.estimates]))
    if again is not attention:
        found = fit(again, observed_N, cluster_N, np.zeros(3))
    exact_N, short_N = (way(np.zeros(3))[0] for way in ways[:2])
    return found, float(np.linalg.norm(rounded(short_N, dtype) - exact_N))


def _without_repetitions(samples: Sequence[Sample]) -> list[Sample]:
    """Samples that begin alike compute the same numbers: each query is kept once."""
    known: set[bytes] = set()
    kept = []
    for sample in samples:
        new = []
        for query in range(len(sample.seen_QK)):
            both = (sample.query_GRQD[:, :, query], sample.observed_GRQD[:, :, query])
            key = b"".join(part.tobytes() for part in both)
            if key not in known:
                known.add(key)
                new.append(query)
        if new:
            turn = (sample.query_turn[0][new], sample.query_turn[1][new])
            kept.append(
                replace(
                    sample,
                    query_GRQD=sample.query_GRQD[:, :, new],
                    observed_GRQD=sample.observed_GRQD[:, :, new],
                    query_turn=turn,
                    seen_QK=sample.seen_QK[new],
                )
            )
    return kept


def _clusters(samples: Sequence[Sample]) -> list[npt.NDArray[np.int64]]:
    """One for each sample and key head, whose keys are rounded once for all queries."""
    heads = sum(len(sample.key_GKD) for sample in samples)
    parts = -(-_FEWEST_CLUSTERS // max(1, heads))
    labels, first = [], 0
    for sample in samples:
        groups, repeats, queries, size = sample.query_GRQD.shape
        label_GQ = np.arange(groups)[:, None] * parts + np.arange(queries) * parts // queries
        shape = (groups, repeats, queries, size)
        labels.append(first + np.broadcast_to(label_GQ[:, None, :, None], shape).reshape(-1))
        first += groups * parts
    return labels
