"""Supervised fine-tuning: cross-entropy over the tokens that bear loss."""

from __future__ import annotations

from typing import Protocol

import torch


class Head(Protocol):
    """Language-model head, as far as the loss uses it."""

    def nll_share(self, loss_tokens: int) -> torch.Tensor:
        """Sum of the negative log-likelihoods divided by `loss_tokens`."""


def sft_loss(head: Head, loss_tokens: int) -> torch.Tensor:
    """This micro-batch's share of the mean over all `loss_tokens` of the step, whatever micro-batch or rank
    they are in: shares add up to the loss, so that neither accumulation nor ranks change it."""
    return head.nll_share(loss_tokens)


# `algorithm.name` to its loss.
SUPERVISED_LOSSES = {"sft": sft_loss}
