"""Norms, rotary embeddings and attention from their definitions, each with its slopes by its constants.

Norms: R rows, D their size. Rotary embeddings: P positions, F frequencies. Attention: G key/value heads,
R query heads of each, Q queries, K keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from isotrain.tools.probes.score_tests.fit import Array, Fit, fit


def rounded(numbers: Array, dtype: str) -> Array:
    """Numbers as a shorter type keeps them: to the nearest, ties to even."""
    if dtype == "float32":
        return numbers.astype(np.float32).astype(np.float64)
    if dtype == "float16":
        return numbers.astype(np.float16).astype(np.float64)
    if dtype == "bfloat16":
        # numpy has none: the upper half of a float32, after half of its last digit was added.
        bits = numbers.astype(np.float32).view(np.uint32)
        bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        short: Array = (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
        return short
    return numbers


NORM_CONSTANTS = ("epsilon", "gain", "bias")


@dataclass(frozen=True)
class Norm:
    """Epsilon and gain are off by a share of themselves, the bias by a share of the output's size."""

    x_RD: Array
    gain_D: Array
    epsilon: float

    def __call__(self, off_C: Array) -> tuple[Array, Array]:
        epsilon_off, gain_off, bias = off_C
        mean_R1 = (self.x_RD * self.x_RD).mean(-1, keepdims=True)
        # An epsilon that cannot be told may come out negative: it must not reach the mean.
        under_R1 = np.maximum(mean_R1 + self.epsilon * (1 + epsilon_off), 0.1 * (mean_R1 + self.epsilon))
        y_RD = self.x_RD / np.sqrt(under_R1) * self.gain_D
        by_epsilon_RD = y_RD * (-0.5 * self.epsilon * (1 + gain_off)) / under_R1
        size_RD = np.full_like(y_RD, self.size)
        slope_NC = np.stack([part.reshape(-1) for part in (by_epsilon_RD, y_RD, size_RD)], -1)
        return ((1 + gain_off) * y_RD + bias * size_RD).reshape(-1), slope_NC

    @property
    def size(self) -> float:
        """The gain's: the output's root mean square is about that, whatever goes in."""
        return float(np.sqrt((self.gain_D * self.gain_D).mean())) or 1.0


def check_norm(norm: Norm, observed_RD: Array, dtype: str) -> tuple[Fit, float]:
    """The fit over rows that are not alike, and the norm of the error that one rounding would make."""
    # Equal rows are rounded equally: they are one observation.
    _, first_R = np.unique(norm.x_RD, axis=0, return_index=True)
    norm, observed_RD = Norm(norm.x_RD[first_R], norm.gain_D, norm.epsilon), observed_RD[first_R]
    row_N = np.repeat(np.arange(len(first_R)), observed_RD.shape[1])
    expected_N, _ = norm(np.zeros(3))
    rounding = float(np.linalg.norm(rounded(expected_N, dtype) - expected_N))
    return fit(norm, observed_RD.reshape(-1), row_N, np.zeros(3)), rounding


ROTARY_CONSTANTS = ("base", "gain")

# Radians by which an angle changes per unit of the base's logarithm. Few of them first, so that a base
# that is many times too large is found; then more, for digits. An angle beyond the last is on another turn.
_LARGEST_SLOPES = (0.3, 3.0, 30.0)
_STEP = 1e-4


@dataclass(frozen=True)
class Rope:
    """Constants of one rotary embedding, as a config states them."""

    kind: str
    base: float
    head_size: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: float = 8192.0

    def frequencies(self, base: float) -> Array:
        plain_F = base ** (-np.arange(0, self.head_size, 2, dtype=np.float64) / self.head_size)
        if self.kind == "linear":
            return plain_F / self.factor
        if self.kind == "llama3":
            return self._llama3(plain_F)
        assert self.kind == "default"
        return plain_F

    def _llama3(self, plain_F: Array) -> Array:
        """Long waves are stretched by the factor, short ones not, those between by a mixture."""
        waves_F = self.original_positions * plain_F / (2 * math.pi)
        share_F = (waves_F - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share_F = np.clip(share_F, 0.0, 1.0)
        return plain_F * (share_F + (1 - share_F) / self.factor)


@dataclass(frozen=True)
class Rotary:
    """The base is off by its logarithm, the gain by a share of itself."""

    rope: Rope
    positions_P: Array
    largest_slope: float

    def angles(self) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Angles of all positions and frequencies, and which of them are compared."""
        angle_PF = self.positions_P[:, None] * self.rope.frequencies(self.rope.base)
        return angle_PF, np.abs(self._by_base(0.0)) <= self.largest_slope

    def _by_base(self, off: float) -> Array:
        above, below = (self.rope.frequencies(self.rope.base * math.exp(off + h)) for h in (_STEP, -_STEP))
        slope: Array = self.positions_P[:, None] * (above - below) / (2 * _STEP)
        return slope

    def __call__(self, off_C: Array) -> tuple[Array, Array]:
        # A step to a base beyond all numbers is one that the fit takes back.
        base_off, gain_off = float(np.clip(off_C[0], -50.0, 50.0)), off_C[1]
        angle_PF = self.positions_P[:, None] * self.rope.frequencies(self.rope.base * math.exp(base_off))
        used_PF, by_base_PF = self.angles()[1], self._by_base(base_off)
        cos, sin, slope = np.cos(angle_PF)[used_PF], np.sin(angle_PF)[used_PF], by_base_PF[used_PF]
        values_N = np.concatenate([cos, sin])
        by_base_N = (1 + gain_off) * np.concatenate([-sin * slope, cos * slope])
        return (1 + gain_off) * values_N, np.stack([by_base_N, values_N], -1)


def check_rotary(
    rope: Rope, positions_P: Array, cos_PF: Array, sin_PF: Array, dtype: str
) -> tuple[Fit, float]:
    """The fit over positions that are not alike, and the norm of the error that rounding would make."""
    positions_P, first_P = np.unique(positions_P, return_index=True)
    cos_PF, sin_PF = cos_PF[first_P], sin_PF[first_P]
    off_C = np.zeros(2)
    for largest_slope in _LARGEST_SLOPES:
        rotary = Rotary(rope, positions_P, largest_slope)
        angle_PF, used_PF = rotary.angles()
        # What a frequency is rounded to is shared by all positions.
        frequency_N = np.tile(np.broadcast_to(np.arange(angle_PF.shape[1]), angle_PF.shape)[used_PF], 2)
        base_fit = fit(rotary, np.concatenate([cos_PF[used_PF], sin_PF[used_PF]]), frequency_N, off_C)
        off_C = np.array([estimate.off for estimate in base_fit.estimates])
    short_PF = rounded(rounded(rope.frequencies(rope.base), "float32") * positions_P[:, None], "float32")
    error = [
        rounded(function(short_PF), dtype)[used_PF] - function(angle_PF)[used_PF]
        for function in (np.cos, np.sin)
    ]
    return _base_as_share(base_fit), float(np.linalg.norm(np.concatenate(error)))


def _base_as_share(base_fit: Fit) -> Fit:
    """From the base's logarithm."""
    base, gain = base_fit.estimates
    ratio = math.exp(min(50.0, max(-50.0, base.off)))
    error = None if base.error is None else ratio * base.error
    return replace(base_fit, estimates=(replace(base, off=ratio - 1, error=error), gain))


ATTENTION_CONSTANTS = ("scale", "gain", "bias")

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
class AttentionSample:
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

    samples: Sequence[AttentionSample]
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


def check_attention(samples: Sequence[AttentionSample], scale: float, dtype: str) -> tuple[Fit, float]:
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
    result = fit(attention, observed_N, cluster_N, np.zeros(3))
    # A wrong constant hides how it was rounded: only beside the fitted one can that be seen.
    again = best(np.array([estimate.off for estimate in result.estimates]))
    if again is not attention:
        result = fit(again, observed_N, cluster_N, np.zeros(3))
    exact_N, short_N = (way(np.zeros(3))[0] for way in ways[:2])
    return result, float(np.linalg.norm(rounded(short_N, dtype) - exact_N))


def _without_repetitions(samples: Sequence[AttentionSample]) -> list[AttentionSample]:
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


def _clusters(samples: Sequence[AttentionSample]) -> list[npt.NDArray[np.int64]]:
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
