"""Divergences of the policy from a teacher, token by token: over the vocabulary, or of sampled tokens.

C: tokens of a chunk, V: vocabulary, K: tokens that are compared, N: response tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from isotrain.algorithms.aggregation import AGGREGATIONS, Loss, LossNormalizer
from isotrain.algorithms.kl import KL_ESTIMATORS, k1


def forward_kl(logp_CK: torch.Tensor, teacher_logp_CK: torch.Tensor) -> torch.Tensor:
    """`sum teacher (log teacher - log policy)`: the policy covers all that the teacher does."""
    return (teacher_logp_CK.exp() * (teacher_logp_CK - logp_CK)).sum(-1)


def reverse_kl(logp_CK: torch.Tensor, teacher_logp_CK: torch.Tensor) -> torch.Tensor:
    """`sum policy (log policy - log teacher)`: the policy leaves out what the teacher would not do."""
    return (logp_CK.exp() * (logp_CK - teacher_logp_CK)).sum(-1)


def jensen_shannon(logp_CK: torch.Tensor, teacher_logp_CK: torch.Tensor) -> torch.Tensor:
    """The mean of both divergences from the mixture in the middle; at most `log 2`."""
    middle_CK = torch.logaddexp(logp_CK, teacher_logp_CK) - math.log(2)
    return (forward_kl(middle_CK, logp_CK) + forward_kl(middle_CK, teacher_logp_CK)) / 2


DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "jsd": jensen_shannon,
}


def divergence(
    name: str, top_k: int | None, logits_CV: torch.Tensor, teacher_logits_CV: torch.Tensor
) -> torch.Tensor:
    """The divergence of each token's distribution.

    With `top_k`, the teacher's most likely tokens are compared one by one and all others as one: still a
    divergence, of which the whole one is the upper bound. Padded vocabularies may have different sizes.
    """
    common = min(logits_CV.shape[-1], teacher_logits_CV.shape[-1])
    logp_CK = logits_CV[:, :common].log_softmax(-1)
    teacher_logp_CK = teacher_logits_CV[:, :common].log_softmax(-1)
    if top_k is not None and top_k < common:
        top_CK = teacher_logp_CK.topk(top_k, dim=-1).indices
        logp_CK, teacher_logp_CK = (_coarse(x_CV, top_CK) for x_CV in (logp_CK, teacher_logp_CK))
    return DIVERGENCES[name](logp_CK, teacher_logp_CK)


def _coarse(logp_CV: torch.Tensor, top_CK: torch.Tensor) -> torch.Tensor:
    """Log-probs of some tokens, and of all others together."""
    others_C1 = logp_CV.scatter(1, top_CK, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logp_CV.gather(1, top_CK), others_C1], dim=-1)


def distillation_advantages(policy_logp_N: torch.Tensor, teacher_logp_N: torch.Tensor) -> torch.Tensor:
    """`log teacher - log policy` of the sampled tokens: the policy gradient of the reverse KL, per token."""
    return -k1(policy_logp_N.detach(), teacher_logp_N.detach())


def sampled_divergence(
    logp_N: torch.Tensor, teacher_logp_N: torch.Tensor, share: LossNormalizer, estimator: str
) -> torch.Tensor:
    """The estimate of the reverse KL from each sampled token, by one of `KL_ESTIMATORS`."""
    # Masked before the estimate: a NaN outside the mask must not reach the gradient either.
    return KL_ESTIMATORS[estimator](share.only(logp_N), share.only(teacher_logp_N.detach()))


def distillation_loss(
    divergence_N: torch.Tensor, share: LossNormalizer, *, coefficient: float, aggregation: str
) -> Loss:
    """`coefficient divergence`, to be added to the policy loss."""
    loss = AGGREGATIONS[aggregation](divergence_N, share)
    return coefficient * loss, {"actor/distillation_loss": loss.detach()}
