"""CISPO: REINFORCE weighted by the clipped ratio, so that no token loses its gradient (arXiv:2506.13585).

N: response tokens of a micro-batch.
"""

from __future__ import annotations

import torch

from isotrain.algorithms.aggregate import Loss, LossNormalizer
from isotrain.algorithms.policy.ratio import bounded, log_ratio, policy_loss


def cispo(
    logp_N: torch.Tensor,
    old_logp_N: torch.Tensor,
    advantages_N: torch.Tensor,
    share: LossNormalizer,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    aggregation: str = "token-mean",
    correction_N: torch.Tensor | None = None,
) -> Loss:
    """`-clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high) A logp`, where the clipped ratio is a constant.

    `clip_ratio_low = 1` leaves the lower side open, as the paper does.
    """
    log_ratio_N = bounded(log_ratio(logp_N, old_logp_N, share)).detach()
    ratio_N = log_ratio_N.exp()
    held_N = ratio_N.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return policy_loss(
        -held_N * share.only(advantages_N) * share.only(logp_N),
        share,
        log_ratio_N=log_ratio_N,
        clipped_N=ratio_N != held_N,
        lower_N=torch.zeros_like(ratio_N),
        correction_N=correction_N,
        aggregation=aggregation,
    )
