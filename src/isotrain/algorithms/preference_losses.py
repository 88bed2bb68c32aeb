"""Losses over preferences: pairs of a chosen and a rejected response, labelled responses, labelled steps.

P: pairs of the micro-batch, S: its responses, N: ends of steps in it, C: classes, in which the second one
means a good step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from isotrain.algorithms.aggregation import Loss
from isotrain.algorithms.segments import assert_aligned, widen

Sums = dict[str, torch.Tensor]
Metrics = dict[str, float]

BINS = 10


def calibration_sums(probability_N: torch.Tensor, happened_N: torch.Tensor, count: int) -> Sums:
    """How far confidence is ahead of the truth, in bins of confidence, as shares of `count` labels.

    `probability_N` is what the model gives to what `happened_N` says. An undecided one is half right.
    """
    assert_aligned(probability_N, happened_N)
    confidence_N = torch.maximum(probability_N, 1 - probability_N)
    right_N = torch.where(
        probability_N == 0.5, 0.5, ((probability_N > 0.5) == happened_N).to(probability_N.dtype)
    )
    bin_N = ((confidence_N - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    gap_N = (confidence_N - right_N) / count
    return {f"gap_{k}": torch.where(bin_N == k, gap_N, 0.0).sum() for k in range(BINS)}


def pair_sums(chosen_N: torch.Tensor, rejected_N: torch.Tensor, pairs: int) -> Sums:
    """Squares of rewards and calibration of pairs: the chosen response wins with `sigmoid(margin)`."""
    chosen_N, rejected_N = widen(chosen_N), widen(rejected_N)
    wins_N = torch.sigmoid(chosen_N - rejected_N)
    return {
        "chosen_square": chosen_N.square().sum() / pairs,
        "rejected_square": rejected_N.square().sum() / pairs,
        **calibration_sums(wins_N, torch.ones_like(wins_N, dtype=torch.bool), pairs),
    }


def pair_metrics(metrics: Metrics) -> Metrics:
    """Metrics of pairs: means as they are, the spread of both sides' rewards, the calibration error."""
    means = dict(metrics)
    spreads = {
        f"{side}_reward_std": _spread(means.pop(f"{side}_square"), means[f"{side}_reward"])
        for side in ("chosen", "rejected")
    }
    return _with_calibration({**means, **spreads})


def response_metrics(metrics: Metrics) -> Metrics:
    """Metrics of responses: mean and spread of the rewards of each kind, from sums over both kinds."""
    rest, rewards = dict(metrics), {}
    for kind in ("chosen", "rejected"):
        total, square = rest.pop(f"{kind}_reward_share"), rest.pop(f"{kind}_square_share")
        count = rest.pop(f"{kind}_share")
        rewards[f"{kind}_reward"] = total / count if count else 0.0
        rewards[f"{kind}_reward_std"] = _spread(square / count, total / count) if count else 0.0
    return {**rest, **rewards, "margin": rewards["chosen_reward"] - rewards["rejected_reward"]}


def step_metrics(metrics: Metrics) -> Metrics:
    """Metrics of steps: F1 of finding the wrong ones, the calibration error."""
    counted = ("found", "called_wrong", "wrong")
    hits, called, wrong = (metrics[name] for name in counted)
    rest = {name: value for name, value in metrics.items() if name not in counted}
    return _with_calibration({**rest, "f1": 2 * hits / (called + wrong) if called + wrong else 1.0})


def _spread(square: float, mean: float) -> float:
    return math.sqrt(max(0.0, square - mean * mean))


def _with_calibration(metrics: Metrics) -> Metrics:
    """The expected calibration error: the mean distance of confidence and truth over the bins."""
    error = sum(abs(metrics.pop(f"gap_{k}")) for k in range(BINS))
    return {**metrics, "calibration_error": error}


@dataclass(frozen=True)
class Side:
    """One side of the pairs: the chosen responses, or the rejected ones."""

    logp_P: torch.Tensor
    """The sum of the response's log-probs under the policy."""
    ref_logp_P: torch.Tensor | None
    """The same under the reference; None for losses that have none."""
    tokens_P: torch.Tensor
    """Tokens of the response."""

    def __post_init__(self) -> None:
        assert_aligned(self.logp_P, self.ref_logp_P, self.tokens_P)

    def mean_logp_P(self) -> torch.Tensor:
        return widen(self.logp_P) / self.tokens_P.clamp(min=1)

    def log_ratio_P(self, length_averaged: bool = False) -> torch.Tensor:
        """How much more likely the response is than under the reference, in all or per token."""
        assert self.ref_logp_P is not None, "this loss compares with a reference"
        ratio_P = widen(self.logp_P) - widen(self.ref_logp_P.detach())
        return ratio_P / self.tokens_P.clamp(min=1) if length_averaged else ratio_P


class PairLosses(NamedTuple):
    """Each pair's loss, and the implicit rewards of its responses."""

    loss_P: torch.Tensor
    chosen_P: torch.Tensor
    rejected_P: torch.Tensor


def smoothed(h_P: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """`-(1 - eps) log sigmoid(h) - eps log sigmoid(-h)`, where eps of the pairs have swapped labels."""
    return -(1 - label_smoothing) * F.logsigmoid(h_P) - label_smoothing * F.logsigmoid(-h_P)


def shares(losses: PairLosses, pairs: int) -> Loss:
    """A micro-batch's share of the mean over all `pairs` of the step, and of its metrics."""
    assert_aligned(*losses)
    chosen_P, rejected_P = losses.chosen_P.detach(), losses.rejected_P.detach()
    loss = losses.loss_P.sum() / pairs
    return loss, {
        "accuracy": (chosen_P > rejected_P).float().sum() / pairs,
        "margin": (chosen_P - rejected_P).sum() / pairs,
        "chosen_reward": chosen_P.sum() / pairs,
        "rejected_reward": rejected_P.sum() / pairs,
        **pair_sums(chosen_P, rejected_P, pairs),
    }


def dpo(
    chosen: Side,
    rejected: Side,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    length_averaged: bool = False,
) -> PairLosses:
    """Direct preference optimisation (Rafailov et al., arXiv:2305.18290), with smoothed labels.

    `-(1 - eps) log sigmoid(h) - eps log sigmoid(-h)`, `h = beta [(logp_c - ref_c) - (logp_r - ref_r)]`.
    `label_smoothing` is the assumed fraction of pairs with swapped labels. With
    `length_averaged`, log-probs are means over a response's tokens.
    """
    chosen_P = beta * chosen.log_ratio_P(length_averaged)
    rejected_P = beta * rejected.log_ratio_P(length_averaged)
    h_P = chosen_P - rejected_P
    return PairLosses(smoothed(h_P, label_smoothing), chosen_P, rejected_P)


def ipo(chosen: Side, rejected: Side, *, beta: float = 0.1, length_averaged: bool = False) -> PairLosses:
    """Identity preference optimisation (Azar et al., arXiv:2310.12036): a fixed target margin.

    `((logp_c - ref_c) - (logp_r - ref_r) - 1 / (2 beta))^2`; TRL has it with `length_averaged`.
    """
    chosen_P, rejected_P = chosen.log_ratio_P(length_averaged), rejected.log_ratio_P(length_averaged)
    loss_P = (chosen_P - rejected_P - 1 / (2 * beta)).square()
    return PairLosses(loss_P, beta * chosen_P, beta * rejected_P)


def simpo(
    chosen: Side, rejected: Side, *, beta: float = 2.0, margin: float = 1.0, label_smoothing: float = 0.0
) -> PairLosses:
    """Simple preference optimisation (Meng et al., arXiv:2405.14734): log-probs per token, no reference.

    `-log sigmoid(h)`, `h = beta (mean logp_c - mean logp_r) - margin`, with labels smoothed as in DPO.
    """
    chosen_P, rejected_P = beta * chosen.mean_logp_P(), beta * rejected.mean_logp_P()
    h_P = chosen_P - rejected_P - margin
    return PairLosses(smoothed(h_P, label_smoothing), chosen_P, rejected_P)


def orpo(chosen: Side, rejected: Side, *, beta: float = 0.1) -> PairLosses:
    """Odds-ratio preference optimisation (Hong et al., arXiv:2403.07691): SFT and preference in one.

    `nll_c - beta log sigmoid(log odds_c - log odds_r)`, `odds = p / (1 - p)`, `p = exp(mean logp)`.
    The negative log-likelihood of the chosen response is the mean over its tokens, as its odds are.
    """
    chosen_P, rejected_P = chosen.mean_logp_P(), rejected.mean_logp_P()
    log_odds_P = (chosen_P - rejected_P) - (_log1mexp(chosen_P) - _log1mexp(rejected_P))
    loss_P = -chosen_P - beta * F.logsigmoid(log_odds_P)
    return PairLosses(loss_P, beta * chosen_P, beta * rejected_P)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """`log(1 - exp(x))` for x < 0, exact near 0 and far from it (Maechler 2012)."""
    x = x.clamp(max=-1e-7)  # a certain response has infinite odds
    near = x > -math.log(2)
    # Each branch gets harmless numbers where the other is taken: no gradient is 0 times infinity.
    close = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, close, far)


# All are called as `loss(chosen, rejected, **options)`, two `Side`s of the same pairs.
PREFERENCE_LOSSES: dict[str, Callable[..., PairLosses]] = {
    "sigmoid": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
}


def rm(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    *,
    margin_P: torch.Tensor | None = None,
    loss: str = "sigmoid",
    centre: float = 0.0,
) -> PairLosses:
    """Reward model (Bradley-Terry): a score for each response, higher for the better one.

    `-log sigmoid(r_c - r_r - margin)`, or with `logexp` `log(1 + exp(r_r - r_c))`. The two are the same
    function; the second takes no margin, and is how OpenRLHF names and computes it. `centre` times
    `(r_c + r_r)^2` keeps scores around 0, which pairs alone do not determine.
    """
    assert_aligned(chosen_P, rejected_P, margin_P)
    chosen_P, rejected_P = widen(chosen_P), widen(rejected_P)
    difference_P = chosen_P - rejected_P
    if loss == "logexp":
        assert margin_P is None, "logexp has no margin"
        loss_P = F.softplus(-difference_P)
    else:
        loss_P = -F.logsigmoid(difference_P if margin_P is None else difference_P - margin_P)
    if centre:
        loss_P = loss_P + centre * (chosen_P + rejected_P).square()
    return PairLosses(loss_P, chosen_P, rejected_P)


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
    """Kahneman-Tversky optimisation (Ethayarajh et al., arXiv:2402.01306): responses labelled one by one.

    Desirable: `w_d (1 - sigmoid(beta (l - KL)))`; undesirable: `w_u (1 - sigmoid(beta (KL - l)))`.
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


def two_classes(logits_NC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of bad and good among the two: of a head with two classes, or of the two tokens for them."""
    assert logits_NC.shape[1] == 2
    logq_NC = F.log_softmax(widen(logits_NC), -1)
    return logq_NC[:, 0], logq_NC[:, 1]


def prm(logq_bad_N: torch.Tensor, logq_good_N: torch.Tensor, labels_N: torch.Tensor, steps: int) -> Loss:
    """Process reward model: cross-entropy at the ends of steps, as a share of the mean over all `steps`.

    `logq_*` come from `two_classes`, or are the two tokens' log-probs among the whole vocabulary. Labels
    between 0 and 1 are probabilities of a good step: `-(1 - p) log q_bad - p log q_good`.
    """
    assert_aligned(logq_bad_N, logq_good_N, labels_N)
    logq_bad_N, logq_good_N = widen(logq_bad_N), widen(logq_good_N)
    good_N = labels_N.to(logq_bad_N.dtype)
    loss_N = -(1 - good_N) * logq_bad_N - good_N * logq_good_N
    right_N = (logq_good_N > logq_bad_N) == (good_N > 0.5)
    return loss_N.sum() / steps, {"accuracy": right_N.float().sum() / steps}
