"""Policy losses, the entropy bonus, and the loss of the critic.

R: trajectories of a micro-batch, N: their response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from isotrain.algorithms.advantages import Moments
from isotrain.algorithms.aggregation import AGGREGATIONS, Loss, LossNormalizer
from isotrain.algorithms.segments import spread, sums, widen

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
    """PPO's clipped loss (arXiv:1707.06347) with dual clip (arXiv:1912.09729).

    `max(-A rho, -A clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high))`, at most `-A dual_clip` at A < 0.
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


# As in verl, lower than for tokens: a mean over a whole trajectory has no business being above it.
LARGEST_SEQUENCE_LOG_RATIO = 10.0


def geometric_mean(log_ratio_N: torch.Tensor, share: LossNormalizer) -> torch.Tensor:
    """The geometric mean of a trajectory's ratios at each of its tokens, with the token's own gradient."""
    mean_N = spread(sums(log_ratio_N.detach(), share.lengths) / share.counts_R, share.lengths)
    # The brackets matter: the difference is exactly 0, and the mean keeps its digits.
    straight_N = mean_N + (log_ratio_N - log_ratio_N.detach())
    return straight_N.clamp(max=LARGEST_SEQUENCE_LOG_RATIO).exp()


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
    """GSPO: one ratio per trajectory, the geometric mean of its tokens' ratios (arXiv:2507.18071).

    `max(-A s, -A clip(s))` with `s = exp(mean(logp - old_logp))` of the token's trajectory. The value of
    every token is s, its gradient is s times the token's own: averaged over the trajectory that is the
    gradient of s itself, and advantages may still differ between tokens.
    """
    log_ratio_N = log_ratio(logp_N, old_logp_N, share)
    ratio_N = geometric_mean(log_ratio_N, share)
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


def gmpo(
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
    """GMPO: the geometric mean of a trajectory's ratios, each clipped before it (arXiv:2507.20673).

    `-A exp(mean(l))`, where l is `min(logp - old, clip_ratio_high)` at A > 0 and otherwise
    `max(logp - old, -clip_ratio_low)`. A clipped token has no gradient, the others of its trajectory keep
    theirs.
    """
    log_ratio_N = log_ratio(logp_N, old_logp_N, share)
    advantages_N = share.only(advantages_N)
    upper_N, lower_N = log_ratio_N.clamp(max=clip_ratio_high), log_ratio_N.clamp(min=-clip_ratio_low)
    held_N = torch.where(advantages_N > 0, upper_N, lower_N)
    return policy_loss(
        -advantages_N * geometric_mean(held_N, share),
        share,
        log_ratio_N=bounded(log_ratio_N),
        clipped_N=held_N != log_ratio_N,
        lower_N=torch.zeros_like(held_N),
        correction_N=correction_N,
        aggregation=aggregation,
    )


def sapo(
    logp_N: torch.Tensor,
    old_logp_N: torch.Tensor,
    advantages_N: torch.Tensor,
    share: LossNormalizer,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    aggregation: str = "seq-mean-token-mean",
    correction_N: torch.Tensor | None = None,
) -> Loss:
    """SAPO (arXiv:2511.20347): a soft gate in place of the clip, `-A 4 / tau sigmoid(tau (rho - 1))`.

    The temperature is `tau_pos` where A > 0 and `tau_neg` elsewhere: the larger, the sooner a token that has
    moved loses its gradient, which is that of REINFORCE at `rho = 1`.
    """
    log_ratio_N = bounded(log_ratio(logp_N, old_logp_N, share))
    advantages_N = share.only(advantages_N)
    tau_N = torch.where(advantages_N > 0, tau_pos, tau_neg)
    gate_N = torch.sigmoid(tau_N * (log_ratio_N.exp() - 1)) * 4 / tau_N
    never_N = torch.zeros_like(share.mask_N)
    return policy_loss(
        -advantages_N * gate_N,
        share,
        log_ratio_N=log_ratio_N,
        clipped_N=never_N,
        lower_N=never_N,
        correction_N=correction_N,
        aggregation=aggregation,
    )


def total_variation(logp_N: torch.Tensor, old_logp_N: torch.Tensor) -> torch.Tensor:
    """Distance of policies that only tell a token from all others: `abs(p - q)`, where q is the old one's."""
    return (logp_N.exp() - old_logp_N.exp()).abs()


def binary_kl(logp_N: torch.Tensor, old_logp_N: torch.Tensor) -> torch.Tensor:
    """KL divergence of the same: `q log(q / p) + (1 - q) log((1 - q) / (1 - p))`."""
    new_N, old_N = logp_N.exp(), old_logp_N.exp()
    # Beside 1 the probability of all others may be rounded to 0: verl adds the same.
    others_N = torch.log((1 - old_N + 1e-8) / (1 - new_N + 1e-8))
    return old_N * (old_logp_N - logp_N) + (1 - old_N) * others_N


def dppo(
    divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    logp_N: torch.Tensor,
    old_logp_N: torch.Tensor,
    advantages_N: torch.Tensor,
    share: LossNormalizer,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    max_ratio: float = 20.0,
    aggregation: str = "token-mean",
    correction_N: torch.Tensor | None = None,
) -> Loss:
    """DPPO (arXiv:2602.04879) leaves out tokens whose probability is too far from the old one.

    `-min(rho, max_ratio) A logp`, where the ratio is a constant; 0 where the policy has moved the way that A
    wants and the divergence is above `clip_ratio_high` (A > 0) or `clip_ratio_low`.
    """
    log_ratio_N = bounded(log_ratio(logp_N, old_logp_N, share)).detach()
    advantages_N, ratio_N = share.only(advantages_N), log_ratio_N.exp()
    distance_N = divergence(share.only(logp_N.detach()), share.only(old_logp_N.detach()))
    too_high_N = (distance_N > clip_ratio_high) & (log_ratio_N > 0)
    too_low_N = (distance_N > clip_ratio_low) & (log_ratio_N < 0)
    left_out_N = torch.where(advantages_N > 0, too_high_N, too_low_N)
    loss_N = -ratio_N.clamp(max=max_ratio) * advantages_N * share.only(logp_N)
    return policy_loss(
        torch.where(left_out_N, 0.0, loss_N),
        share,
        log_ratio_N=log_ratio_N,
        clipped_N=left_out_N,
        lower_N=(ratio_N > max_ratio) & ~left_out_N,
        correction_N=correction_N,
        aggregation=aggregation,
    )


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
    """CISPO (arXiv:2506.13585): REINFORCE weighted by the clipped ratio, so that no token loses its gradient.

    `-clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high) A logp`, where the clipped ratio is a constant.
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


def reinforce(
    logp_N: torch.Tensor,
    old_logp_N: torch.Tensor,
    advantages_N: torch.Tensor,
    share: LossNormalizer,
    *,
    aggregation: str = "token-mean",
    correction_N: torch.Tensor | None = None,
) -> Loss:
    """REINFORCE (Williams, 1992): `-A logp`; the old log-probs only tell how far the policy has moved."""
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


# All are called as `loss(logp_N, old_logp_N, advantages_N, share, **options)`.
POLICY_LOSSES: dict[str, Callable[..., Loss]] = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "gmpo": gmpo,
    "sapo": sapo,
    "dppo-tv": partial(dppo, total_variation),
    "dppo-kl": partial(dppo, binary_kl),
}


def entropy_bonus(
    entropy_N: torch.Tensor,
    share: LossNormalizer,
    *,
    coefficient: float = 0.0,
    aggregation: str = "token-mean",
) -> Loss:
    """Entropy bonus: `-coefficient entropy`, to be added to the policy loss."""
    entropy = AGGREGATIONS[aggregation](entropy_N, share)
    return -coefficient * entropy, {"actor/entropy": entropy.detach()}


def value_loss(
    values_N: torch.Tensor,
    old_values_N: torch.Tensor,
    returns_N: torch.Tensor,
    share: LossNormalizer,
    *,
    clip: float | None = 0.5,
    aggregation: str = "token-mean",
) -> Loss:
    """`max((v - R)^2, (v_clip - R)^2) / 2`, where `v_clip` is v kept within `clip` of the old value.

    The larger of the two: clipping holds a value back that moved far, and never makes a loss look smaller.
    """
    values_N = share.only(values_N)
    old_values_N, returns_N = share.only(old_values_N.detach()), share.only(returns_N.detach())
    squares_N = (values_N - returns_N).square()
    clipped_N = torch.zeros_like(share.mask_N)
    if clip is not None:
        held_N = torch.clamp(values_N, old_values_N - clip, old_values_N + clip)
        held_squares_N = (held_N - returns_N).square()
        clipped_N = held_squares_N > squares_N
        squares_N = torch.maximum(squares_N, held_squares_N)
    loss = AGGREGATIONS[aggregation](squares_N / 2, share)
    return loss, {"critic/vf_loss": loss.detach(), "critic/vf_clipfrac": share.mean(clipped_N)}


def explained_variance(returns: Moments, residuals: Moments) -> float:
    """`1 - var(R - V) / var(R)`: 1 for a perfect critic, 0 for one that knows the mean alone.

    Not a number for fewer than two tokens.
    """
    if returns.number < 2:
        return math.nan
    return 1 - residuals.variance() / (returns.variance() + 1e-5)
