"""Kahneman-Tversky optimisation (Ethayarajh et al., arXiv:2402.01306): answers judged one by one.

S: answers of the micro-batch.
"""

from __future__ import annotations

import torch

from isotrain.algorithms.aggregate import Loss
from isotrain.algorithms.flat import widen


def reference_point(log_ratio_sum: float, answers: int) -> float:
    """`max(0, mean of logp - ref)` over mismatched pairs of prompt and answer, of the whole step.

    It estimates how far the policy is from the reference. Micro-batches and ranks add up their sums first:
    a mean of means would depend on how the step is cut.
    """
    return max(0.0, log_ratio_sum / answers) if answers else 0.0


def kto(
    logp_S: torch.Tensor,
    ref_logp_S: torch.Tensor,
    desirable_S: torch.Tensor,
    *,
    kl: float,
    answers: int,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Loss:
    """Desirable: `w_d (1 - sigmoid(beta (l - KL)))`; undesirable: `w_u (1 - sigmoid(beta (KL - l)))`.

    `l = logp - ref`; `kl` is the step's reference point, which bears no gradient. The loss is a share of the
    mean over the step's `answers`.
    """
    log_ratio_S = widen(logp_S) - widen(ref_logp_S.detach())
    sign_S = torch.where(desirable_S, 1.0, -1.0)
    weight_S = torch.where(desirable_S, desirable_weight, undesirable_weight)
    loss_S = weight_S * (1 - torch.sigmoid(beta * sign_S * (log_ratio_S - kl)))
    reward_S = beta * log_ratio_S.detach()
    return loss_S.sum() / answers, {
        # With how many of each kind there are, these make means once they are added up.
        "chosen_reward_share": torch.where(desirable_S, reward_S, 0.0).sum() / answers,
        "rejected_reward_share": torch.where(desirable_S, 0.0, reward_S).sum() / answers,
        "chosen_square_share": torch.where(desirable_S, reward_S.square(), 0.0).sum() / answers,
        "rejected_square_share": torch.where(desirable_S, 0.0, reward_S.square()).sum() / answers,
        "chosen_share": desirable_S.float().sum() / answers,
        "rejected_share": (~desirable_S).float().sum() / answers,
    }
