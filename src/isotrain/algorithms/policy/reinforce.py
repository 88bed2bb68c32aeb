"""REINFORCE: the plain policy gradient, without a ratio (Williams, 1992).

N: response tokens of a micro-batch.
"""

from __future__ import annotations

import torch

from isotrain.algorithms.aggregate import Loss, LossNormalizer
from isotrain.algorithms.policy.ratio import bounded, log_ratio, policy_loss


def reinforce(
    logp_N: torch.Tensor,
    old_logp_N: torch.Tensor,
    advantages_N: torch.Tensor,
    share: LossNormalizer,
    *,
    aggregation: str = "token-mean",
    correction_N: torch.Tensor | None = None,
) -> Loss:
    """`-A logp`; the old log-probs only tell how far the policy has moved."""
    never_N = torch.zeros_like(share.mask_N)
    return policy_loss(
        -share.only(advantages_N) * share.only(logp_N),
        share,
        log_ratio_N=bounded(log_ratio(logp_N, old_logp_N, share)),
        clipped_N=never_N,
        lower_N=never_N,
        correction_N=correction_N,
        aggregation=aggregation,
    )
