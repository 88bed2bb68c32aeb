"""Inputs and outputs of every loss over pairs of a chosen and a rejected response.

P: pairs of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from isotrain.algorithms.aggregate import Loss
from isotrain.algorithms.preference.metrics import pair_sums
from isotrain.algorithms.segments import assert_aligned, widen


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
    """Of each pair: its loss, and the implicit rewards of its responses."""

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
