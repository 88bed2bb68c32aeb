"""How far the probabilities of the rollout engine are from those of the trained model.

N: response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

import torch

from isotrain.algorithms.aggregation import LossNormalizer
from isotrain.algorithms.policy_losses import bounded, log_ratio
from isotrain.algorithms.segments import spread, sums, widen


class Mismatch(NamedTuple):
    """Sums over tokens, and the one maximum, from which the metrics of a whole batch are made."""

    number: float
    largest: float
    difference: float
    difference_squared: float
    trained: float
    trained_squared: float
    rollout: float
    rollout_squared: float
    product: float
    log_difference: float
    log_ratio: float
    k3: float
    ratio_squared: float

    def metrics(self) -> dict[str, float]:
        """A mean difference below 0.01 is healthy. Not a number where there are too few tokens to say."""
        n = self.number
        mean = self.difference / n if n else math.nan
        spread = self.difference_squared - n * mean**2
        trained = n * self.trained_squared - self.trained**2
        rollout = n * self.rollout_squared - self.rollout**2
        per_token = 1 / n if n else math.nan
        common = n * self.product - self.trained * self.rollout
        return {
            "training/rollout_logp_diff_mean": self.log_difference * per_token,
            "training/rollout_probs_diff_mean": mean,
            "training/rollout_probs_diff_max": self.largest if n else math.nan,
            "training/rollout_probs_diff_std": math.sqrt(max(spread, 0.0) / (n - 1)) if n > 1 else math.nan,
            "training/rollout_actor_probs_pearson_corr": (
                common / math.sqrt(trained * rollout) if trained > 0 and rollout > 0 else math.nan
            ),
            "rollout_corr/kl": -self.log_ratio * per_token,
            "rollout_corr/k3_kl": self.k3 * per_token,
            "rollout_corr/chi2_token": self.ratio_squared * per_token - 1,
        }


NOT_MEASURED = Mismatch(*(0.0 for _ in Mismatch._fields))


def mismatch(logp_N: torch.Tensor, rollout_logp_N: torch.Tensor, mask_N: torch.Tensor) -> Mismatch:
    """The sums over the tokens under the mask, on the host in float64."""
    logs = [widen(logp[mask_N].detach()).cpu().double() for logp in (logp_N, rollout_logp_N)]
    trained, rollout = (log.exp() for log in logs)
    difference, log_ratio_N = (trained - rollout).abs(), bounded(logs[0] - logs[1])
    return Mismatch(
        number=float(len(difference)),
        largest=difference.max().item() if len(difference) else 0.0,
        difference=difference.sum().item(),
        difference_squared=difference.square().sum().item(),
        trained=trained.sum().item(),
        trained_squared=trained.square().sum().item(),
        rollout=rollout.sum().item(),
        rollout_squared=rollout.square().sum().item(),
        product=(trained * rollout).sum().item(),
        log_difference=(logs[0] - logs[1]).abs().sum().item(),
        log_ratio=(logs[0] - logs[1]).sum().item(),
        k3=DIVERGENCES["k3"](log_ratio_N).sum().item(),
        ratio_squared=(2 * log_ratio_N).exp().sum().item(),
    )


def combine(parts: Iterable[Mismatch]) -> Mismatch:
    """The mismatch of all parts together."""
    parts = list(parts)
    total = Mismatch(*(math.fsum(column) for column in zip(*parts, strict=True)))
    return total._replace(largest=max(part.largest for part in parts))


def rollout_correction(
    logp_N: torch.Tensor,
    rollout_logp_N: torch.Tensor,
    share: LossNormalizer,
    *,
    level: Literal["off", "token", "sequence", "geometric"] = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    upper: float = 2.0,
    lower: float | None = None,
    reject: Mapping[str, tuple[float, float]] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Importance weights `exp(logp - rollout_logp)` for `correction_N` of a policy loss, as constants.

    The ratio is a token's, the product over its trajectory (`sequence`), or that product's root of as many
    tokens (`geometric`), which every token of it then gets. Weights above `upper` (and below `lower`, if
    given) are truncated to it, or masked, which makes them 0; `lower` is then `1 / upper` unless given.
    Tokens beyond any bound of `reject` weigh 0, as do those outside the mask.
    """
    log_ratio_N = log_ratio(logp_N.detach(), rollout_logp_N, share)
    weights_N, metrics = torch.ones_like(log_ratio_N), {}
    if level != "off":
        if level != "token":
            log_ratios_R = (_sequence_sum if level == "sequence" else _sequence_mean)(log_ratio_N, share)
            ratio_N = spread(bounded(log_ratios_R).exp(), share.lengths)
        else:
            ratio_N = bounded(log_ratio_N).exp()
        lowest = 1 / upper if lower is None else lower
        if mode == "mask":
            weights_N = torch.where((ratio_N >= lowest) & (ratio_N <= upper), ratio_N, 0.0)
        else:
            weights_N = ratio_N.clamp(lower, upper)
        metrics = {
            "rollout_corr/rollout_is_mean": share.mean(weights_N),
            "rollout_corr/rollout_is_ratio_fraction_high": share.mean(ratio_N > upper),
            "rollout_corr/rollout_is_ratio_fraction_low": share.mean(ratio_N < lowest),
        }
    if reject:
        rejected_N = _rejected(log_ratio_N, share, reject)
        weights_N = torch.where(rejected_N, 0.0, weights_N)
        metrics["rollout_corr/rollout_rs_masked_fraction"] = share.mean(rejected_N)
    return share.only(weights_N), metrics


def _rejected(
    log_ratio_N: torch.Tensor, share: LossNormalizer, reject: Mapping[str, tuple[float, float]]
) -> torch.Tensor:
    """Tokens beyond any bound; what is no number is within none."""
    log_ratio_N = bounded(log_ratio_N)
    kept_N = torch.ones_like(share.mask_N)
    for name, (lowest, highest) in reject.items():
        over, _, kind = name.rpartition("_")
        statistic_N = DIVERGENCES[kind](log_ratio_N)
        if over != "token":
            statistic_N = spread(OVER_SEQUENCE[over](statistic_N, share), share.lengths)
        if kind == "k1":
            lowest, highest = math.log(lowest), math.log(highest)
        kept_N = kept_N & (statistic_N >= lowest) & (statistic_N <= highest)
    return ~kept_N


def _sequence_sum(values_N: torch.Tensor, share: LossNormalizer) -> torch.Tensor:
    return sums(values_N, share.lengths)


def _sequence_mean(values_N: torch.Tensor, share: LossNormalizer) -> torch.Tensor:
    """Over the tokens under the mask; others are 0."""
    return sums(values_N, share.lengths) / share.counts_R


def _sequence_max(values_N: torch.Tensor, share: LossNormalizer) -> torch.Tensor:
    """Of values that are not negative, so that the zeros outside the mask do not count."""
    if not share.lengths:
        return values_N[:0]
    parts = values_N.split(list(share.lengths))
    return torch.stack([part.max() if len(part) else part.sum() for part in parts])


# With verl's names. k1 is bounded on both sides, as a ratio; k2 and k3 are distances.
DIVERGENCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda log_ratio_N: log_ratio_N,
    "k2": lambda log_ratio_N: log_ratio_N.square() / 2,
    "k3": lambda log_ratio_N: log_ratio_N.expm1() - log_ratio_N,
}
OVER_SEQUENCE = {"seq_sum": _sequence_sum, "seq_mean": _sequence_mean, "seq_max": _sequence_max}
