"""How far the probabilities of the rollout engine are from those of the trained model.

N: response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

from isotrain.algorithms.aggregation import LossNormalizer
from isotrain.algorithms.policy_losses import bounded, log_ratio
from isotrain.algorithms.segments import spread, sums, widen


class Mismatch(NamedTuple):
    """Sums over tokens, and the one maximum, from which the metrics of a whole batch are made."""

    number: float
    largest: float
    difference: float
    difference_squared: float
    trained: float
    trained_squared: float
    rollout: float
    rollout_squared: float
    product: float
    log_difference: float

    def metrics(self) -> dict[str, float]:
        """A mean difference below 0.01 is healthy. Not a number where there are too few tokens to say."""
        n = self.number
        mean = self.difference / n if n else math.nan
        spread = self.difference_squared - n * mean**2
        trained = n * self.trained_squared - self.trained**2
        rollout = n * self.rollout_squared - self.rollout**2
        common = n * self.product - self.trained * self.rollout
        return {
            "training/rollout_logp_diff_mean": self.log_difference / n if n else math.nan,
            "training/rollout_probs_diff_mean": mean,
            "training/rollout_probs_diff_max": self.largest if n else math.nan,
            "training/rollout_probs_diff_std": math.sqrt(max(spread, 0.0) / (n - 1)) if n > 1 else math.nan,
            "training/rollout_actor_probs_pearson_corr": (
                common / math.sqrt(trained * rollout) if trained > 0 and rollout > 0 else math.nan
            ),
        }


def mismatch(logp_N: torch.Tensor, rollout_logp_N: torch.Tensor, mask_N: torch.Tensor) -> Mismatch:
    """The sums over the tokens under the mask, on the host in float64."""
    logs = [widen(logp[mask_N].detach()).cpu().double() for logp in (logp_N, rollout_logp_N)]
    trained, rollout = (log.exp() for log in logs)
    difference = (trained - rollout).abs()
    return Mismatch(
        number=float(len(difference)),
        largest=difference.max().item() if len(difference) else 0.0,
        difference=difference.sum().item(),
        difference_squared=difference.square().sum().item(),
        trained=trained.sum().item(),
        trained_squared=trained.square().sum().item(),
        rollout=rollout.sum().item(),
        rollout_squared=rollout.square().sum().item(),
        product=(trained * rollout).sum().item(),
        log_difference=(logs[0] - logs[1]).abs().sum().item(),
    )


def combine(parts: Iterable[Mismatch]) -> Mismatch:
    """The mismatch of all parts together."""
    parts = list(parts)
    total = Mismatch(*(math.fsum(column) for column in zip(*parts, strict=True)))
    return total._replace(largest=max(part.largest for part in parts))


def rollout_correction(
    logp_N: torch.Tensor,
    rollout_logp_N: torch.Tensor,
    share: LossNormalizer,
    *,
    level: Literal["token", "sequence"] = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    upper: float = 2.0,
    lower: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Importance weights `exp(logp - rollout_logp)` for `correction_N` of a policy loss, as constants.

    The ratio is a token's, or the product over its trajectory, which every token of it then gets. Weights
    above `upper` (and below `lower`, if given) are truncated to it, or masked, which makes them 0; `lower` is
    then `1 / upper` unless given. Weights are 0 outside the mask.
    """
    log_ratio_N = log_ratio(logp_N.detach(), rollout_logp_N, share)
    if level == "sequence":
        log_ratio_N = spread(sums(log_ratio_N, share.lengths), share.lengths)
    ratio_N = bounded(log_ratio_N).exp()
    lowest = 1 / upper if lower is None else lower
    if mode == "mask":
        weights_N = torch.where((ratio_N >= lowest) & (ratio_N <= upper), ratio_N, 0.0)
    else:
        weights_N = ratio_N.clamp(lower, upper)
    return share.only(weights_N), {
        "rollout_corr/rollout_is_mean": share.mean(weights_N),
        "rollout_corr/rollout_is_ratio_fraction_high": share.mean(ratio_N > upper),
        "rollout_corr/rollout_is_ratio_fraction_low": share.mean(ratio_N < lowest),
    }
