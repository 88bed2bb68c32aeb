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
    outside: Literal["truncate", "mask"] = "truncate",
    high: float = 2.0,
    low: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Importance weights `exp(logp - rollout_logp)` for `correction_N` of a policy loss, as constants.

    The ratio is a token's, or the product over its trajectory, which every token of it then gets. Weights
    above `high` (and below `low`, if given) are truncated to it, or masked, which makes them 0; `low` is then
    `1 / high` unless given. Weights are 0 outside the mask.
    """
    log_ratio_N = log_ratio(logp_N.detach(), rollout_logp_N, share)
    if level == "sequence":
        log_ratio_N = spread(sums(log_ratio_N, share.lengths), share.lengths)
    ratio_N = bounded(log_ratio_N).exp()
    lowest = 1 / high if low is None else low
    if outside == "mask":
        weights_N = torch.where((ratio_N >= lowest) & (ratio_N <= high), ratio_N, 0.0)
    else:
        weights_N = ratio_N.clamp(low, high)
    return share.only(weights_N), {
        "rollout_corr/rollout_is_mean": share.mean(weights_N),
        "rollout_corr/rollout_is_ratio_fraction_high": share.mean(ratio_N > high),
        "rollout_corr/rollout_is_ratio_fraction_low": share.mean(ratio_N < lowest),
    }
