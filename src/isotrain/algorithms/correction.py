"""Rollout correction: weights for tokens that another policy sampled than the one that is trained.

R: trajectories, N: their response tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from isotrain.algorithms.aggregate import LossNormalizer
from isotrain.algorithms.policy.ratio import bounded, log_ratio
from isotrain.algorithms.segments import spread, sums


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
