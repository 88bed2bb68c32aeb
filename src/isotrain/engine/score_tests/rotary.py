"""A rotary embedding from its definition, with its slopes by base and gain.

P: positions, F: frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from isotrain.engine.score_tests.fit import Array, Fit, fit
from isotrain.engine.score_tests.rounding import rounded

CONSTANTS = ("base", "gain")

# Radians by which an angle changes per unit of the base's logarithm. Few of them first, so that a base
# that is many times too large is found; then more, for digits. An angle beyond the last is on another turn.
_LARGEST_SLOPES = (0.3, 3.0, 30.0)
_STEP = 1e-4


@dataclass(frozen=True)
class Rope:
    """What a config says of one rotary embedding."""

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
        """Of all positions and frequencies, and those that are compared."""
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
        found = fit(rotary, np.concatenate([cos_PF[used_PF], sin_PF[used_PF]]), frequency_N, off_C)
        off_C = np.array([estimate.off for estimate in found.estimates])
    short_PF = rounded(rounded(rope.frequencies(rope.base), "float32") * positions_P[:, None], "float32")
    error = [
        rounded(function(short_PF), dtype)[used_PF] - function(angle_PF)[used_PF]
        for function in (np.cos, np.sin)
    ]
    return _base_as_share(found), float(np.linalg.norm(np.concatenate(error)))


def _base_as_share(found: Fit) -> Fit:
    """From the base's logarithm."""
    base, gain = found.estimates
    ratio = math.exp(min(50.0, max(-50.0, base.off)))
    error = None if base.error is None else ratio * base.error
    return replace(found, estimates=(replace(base, off=ratio - 1, error=error), gain))
