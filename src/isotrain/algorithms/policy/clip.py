"""PPO's clipped loss (arXiv:1707.06347) with dual clip (arXiv:1912.09729).

N: response tokens of a micro-batch.
"""

from __future__ import annotations

import torch

from isotrain.algorithms.aggregate import Loss, LossNormalizer
from isotrain.algorithms.policy.ratio import bounded, log_ratio, policy_loss


def clip(
    logp_N: torch.Tensor,
    old_logp_N: torch.Tensor,
    advantages_N: torch.Tensor,
    share: LossNormalizer,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    dual_clip: float | None = 3.0,
    aggregation: str = "token-mean",
    correction_N: torch.Tensor | None = None,
) -> Loss:
    """`max(-A rho, -A clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high))`, at most `-A dual_clip` at A < 0.

    `clip_ratio_high` above `clip_ratio_low` is DAPO's clip-higher. Without the dual clip a token that became
    much more likely although its advantage is negative has a loss without bound.
    """
    log_ratio_N = bounded(log_ratio(logp_N, old_logp_N, share))
    ratio_N = log_ratio_N.exp()
    advantages_N = share.only(advantages_N)
    free_N = -advantages_N * ratio_N
    held_N = -advantages_N * ratio_N.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss_N = torch.maximum(free_N, held_N)
    lower_N = torch.zeros_like(loss_N, dtype=torch.bool)
    if dual_clip is not None:
        ceiling_N = -advantages_N * dual_clip
        lower_N = (advantages_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(lower_N, ceiling_N, loss_N)
    return policy_loss(
        loss_N,
        share,
        log_ratio_N=log_ratio_N,
        clipped_N=held_N > free_N,
        lower_N=lower_N,
        correction_N=correction_N,
        aggregation=aggregation,
    )
