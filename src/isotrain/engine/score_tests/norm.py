"""An RMSNorm from its definition, with its slopes by epsilon, gain and bias.

R: rows, D: their size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isotrain.engine.score_tests.fit import Array, Fit, fit
from isotrain.engine.score_tests.rounding import rounded

CONSTANTS = ("epsilon", "gain", "bias")


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
