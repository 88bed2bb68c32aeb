"""What all policy losses share: the probability ratio, the way from tokens to loss and metrics.

N: response tokens of a micro-batch.
"""

from __future__ import annotations

import torch

from isotrain.algorithms.aggregate import AGGREGATIONS, Loss, LossNormalizer
from isotrain.algorithms.segments import widen

# exp(20) is half a billion: a ratio beyond it says nothing more, and its exponential may overflow.
LARGEST_LOG_RATIO = 20.0


def log_ratio(logp_N: torch.Tensor, old_logp_N: torch.Tensor, share: LossNormalizer) -> torch.Tensor:
    """`logp - old_logp`, 0 outside the mask; the old policy is a constant even if it is the same tensor."""
    return share.only(widen(logp_N) - widen(old_logp_N.detach()))


def bounded(log_ratio_N: torch.Tensor) -> torch.Tensor:
    return log_ratio_N.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def policy_loss(
    loss_N: torch.Tensor,
    share: LossNormalizer,
    *,
    log_ratio_N: torch.Tensor,
    clipped_N: torch.Tensor,
    lower_N: torch.Tensor,
    correction_N: torch.Tensor | None,
    aggregation: str,
) -> Loss:
    """The aggregated loss, with how far the policy has moved and where it was clipped."""
    if correction_N is not None:
        loss_N = loss_N * share.only(correction_N.detach())
    loss = AGGREGATIONS[aggregation](loss_N, share)
    return loss, {
        "actor/pg_loss": loss.detach(),
        "actor/pg_clipfrac": share.mean(clipped_N),
        "actor/pg_clipfrac_lower": share.mean(lower_N),
        "actor/ppo_kl": share.mean(-log_ratio_N),
    }
