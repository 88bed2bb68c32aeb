"""Kahneman-Tversky optimisation (Ethayarajh et al., arXiv:2402.01306): responses labelled one by one.

S: responses of the micro-batch.
"""

from __future__ import annotations

import torch

from isotrain.algorithms.aggregate import Loss
from isotrain.algorithms.segments import assert_aligned, widen


def reference_point(log_ratio_sum: float, responses: int) -> float:
    """`max(0, mean of logp - ref)` over mismatched pairs of prompt and response, of the whole step.

    It estimates how far the policy is from the reference. Micro-batches and ranks add up their sums first:
    a mean of means would depend on how the step is cut.
    """
    return max(0.0, log_ratio_sum / responses) if responses else 0.0


def kto(
    logp_S: torch.Tensor,
    ref_logp_S: torch.Tensor,
    desirable_S: torch.Tensor,
    *,
    kl: float,
    responses: int,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Loss:
    """Desirable: `w_d (1 - sigmoid(beta (l - KL)))`; undesirable: `w_u (1 - sigmoid(beta (KL - l)))`.

    `l = logp - ref`; `kl` is the step's reference point, which bears no gradient. The loss is a share of the
    mean over the step's `responses`.
    """
    assert_aligned(logp_S, ref_logp_S, desirable_S)
    log_ratio_S = widen(logp_S) - widen(ref_logp_S.detach())
    sign_S = torch.where(desirable_S, 1.0, -1.0)
    weight_S = torch.where(desirable_S, desirable_weight, undesirable_weight)
    loss_S = weight_S * (1 - torch.sigmoid(beta * sign_S * (log_ratio_S - kl)))
    reward_S = beta * log_ratio_S.detach()
    return loss_S.sum() / responses, {
        # With how many of each kind there are, these make means once they are added up.
        "chosen_reward_share": torch.where(desirable_S, reward_S, 0.0).sum() / responses,
        "rejected_reward_share": torch.where(desirable_S, 0.0, reward_S).sum() / responses,
        "chosen_square_share": torch.where(desirable_S, reward_S.square(), 0.0).sum() / responses,
        "rejected_square_share": torch.where(desirable_S, 0.0, reward_S.square()).sum() / responses,
        "chosen_share": desirable_S.float().sum() / responses,
        "rejected_share": (~desirable_S).float().sum() / responses,
    }
