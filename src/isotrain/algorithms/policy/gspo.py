"""GSPO: one ratio per trajectory, the geometric mean of its tokens' ratios (arXiv:2507.18071).

R: trajectories of a micro-batch, N: their response tokens.
"""

from __future__ import annotations

import torch

from isotrain.algorithms.aggregate import Loss, LossNormalizer
from isotrain.algorithms.policy.ratio import bounded, log_ratio, policy_loss
from isotrain.algorithms.segments import spread, sums

# As in verl, lower than for tokens: a mean over a whole trajectory has no business being above it.
LARGEST_SEQUENCE_LOG_RATIO = 10.0


def gspo(
    logp_N: torch.Tensor,
    old_logp_N: torch.Tensor,
    advantages_N: torch.Tensor,
    share: LossNormalizer,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    aggregation: str = "seq-mean-token-mean",
    correction_N: torch.Tensor | None = None,
) -> Loss:
    """`max(-A s, -A clip(s))` with `s = exp(mean(logp - old_logp))` of the token's trajectory.

    The value of every token is s, its gradient is s times the token's own: averaged over the trajectory that
    is the gradient of s itself, and advantages may still differ between tokens.
    """
    log_ratio_N = log_ratio(logp_N, old_logp_N, share)
    counts_R = sums(share.mask_N.to(torch.float32), share.lengths).clamp(min=1)
    mean_N = spread(sums(log_ratio_N.detach(), share.lengths) / counts_R, share.lengths)
    # The brackets matter: the difference is exactly 0, and the mean keeps its digits.
    straight_N = mean_N + (log_ratio_N - log_ratio_N.detach())
    ratio_N = straight_N.clamp(max=LARGEST_SEQUENCE_LOG_RATIO).exp()
    advantages_N = share.only(advantages_N)
    free_N = -advantages_N * ratio_N
    held_N = -advantages_N * ratio_N.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return policy_loss(
        torch.maximum(free_N, held_N),
        share,
        log_ratio_N=bounded(log_ratio_N),
        clipped_N=held_N > free_N,
        lower_N=torch.zeros_like(free_N),
        correction_N=correction_N,
        aggregation=aggregation,
    )
