"""Estimates of the divergence from a reference policy, from the log-probs of sampled tokens alone.

N: response tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from isotrain.algorithms.aggregation import AGGREGATIONS, Loss, LossNormalizer
from isotrain.algorithms.segments import widen

# Beyond these a token's log-ratio is numerical trouble, not divergence. A token at a limit has no gradient.
LARGEST_LOG_RATIO = 20.0
LARGEST_K3 = 10.0


def _distance(logp_N: torch.Tensor, ref_logp_N: torch.Tensor) -> torch.Tensor:
    """`ref - logp`, in which all estimators are written."""
    return (widen(ref_logp_N) - widen(logp_N)).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def k1(logp_N: torch.Tensor, ref_logp_N: torch.Tensor) -> torch.Tensor:
    """`logp - ref`: unbiased, but of either sign, and in a loss its expected gradient is 0."""
    return -_distance(logp_N, ref_logp_N)


def absolute(logp_N: torch.Tensor, ref_logp_N: torch.Tensor) -> torch.Tensor:
    """`|logp - ref|`: a penalty rather than an estimate."""
    return _distance(logp_N, ref_logp_N).abs()


def k2(logp_N: torch.Tensor, ref_logp_N: torch.Tensor) -> torch.Tensor:
    """`(logp - ref)^2 / 2`: biased, but its gradient is the divergence's."""
    return _distance(logp_N, ref_logp_N).square() / 2


def k3(logp_N: torch.Tensor, ref_logp_N: torch.Tensor) -> torch.Tensor:
    """`exp(d) - d - 1` with `d = ref - logp`: unbiased, never negative, of low variance."""
    distance_N = _distance(logp_N, ref_logp_N)
    return (distance_N.exp() - distance_N - 1).clamp(-LARGEST_K3, LARGEST_K3)


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
}


def kl_loss(
    logp_N: torch.Tensor,
    ref_logp_N: torch.Tensor,
    share: LossNormalizer,
    *,
    coefficient: float = 0.001,
    estimator: str = "k3",
    aggregation: str = "token-mean",
) -> Loss:
    """`coefficient KL`, to be added to the policy loss."""
    # Masked before the estimate: a NaN outside the mask must not reach the gradient either.
    kl_N = KL_ESTIMATORS[estimator](share.only(logp_N), share.only(ref_logp_N.detach()))
    kl = AGGREGATIONS[aggregation](kl_N, share)
    return coefficient * kl, {"actor/kl_loss": kl.detach()}


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
