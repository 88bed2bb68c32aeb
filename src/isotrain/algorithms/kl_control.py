"""Controllers of the KL coefficient (arXiv:1909.08593)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class FixedKl:
    coefficient: float = 0.001

    def updated(self, kl: float, sequences: int) -> FixedKl:
        return self


@dataclass(frozen=True)
class AdaptiveKl:
    """Adapts the coefficient so that the KL reaches `target`, by at most 20 % in `horizon` trajectories."""

    coefficient: float = 0.001
    target: float = 0.1
    horizon: int = 10_000

    def updated(self, kl: float, sequences: int) -> AdaptiveKl:
        """The controller after a step with mean divergence `kl` over so many trajectories.

        One that is not finite belongs to a step that is not learnt from, and would stay for good.
        """
        if not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coefficient=self.coefficient * (1 + error * sequences / self.horizon))
