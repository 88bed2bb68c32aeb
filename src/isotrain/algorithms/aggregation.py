"""From losses of tokens to one number: a micro-batch's share of a mean over the whole step.

R: trajectories of the micro-batch, N: their response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from isotrain.algorithms.segments import assert_aligned, spread, sums, widen

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""A micro-batch's share of a loss, which bears the gradient, and its shares of metrics by name."""


@dataclass(frozen=True)
class LossNormalizer:
    """The tokens of one micro-batch, and the size of the step that they are a share of.

    What is divided by the step's size adds up over micro-batches and ranks to the same number, however the
    step is cut. That is true of losses and of the metrics that come with them.
    """

    mask_N: torch.Tensor
    """Tokens that the policy wrote."""
    lengths: Sequence[int]
    """Response tokens of each trajectory, on the host."""
    tokens: int
    """Tokens under the mask in the whole step, over all micro-batches and ranks."""
    sequences: int
    """Trajectories with such a token in the whole step."""
    horizon: int | None = None
    """A constant to divide by instead of a length: the longest response that the recipe allows."""

    @property
    def counts_R(self) -> torch.Tensor:
        """Tokens under the mask of each trajectory, at least one: what a mean divides by."""
        return sums(self.mask_N.to(torch.float32), self.lengths).clamp(min=1)

    def only(self, values_N: torch.Tensor) -> torch.Tensor:
        """The values under the mask and 0 elsewhere, where not even a NaN gets through."""
        assert_aligned(values_N, self.mask_N)
        return torch.where(self.mask_N, widen(values_N), 0.0)

    def mean(self, values_N: torch.Tensor) -> torch.Tensor:
        """The share of a metric's mean over tokens."""
        return token_mean(values_N.detach(), self)


def token_mean(values_N: torch.Tensor, share: LossNormalizer) -> torch.Tensor:
    """Every token of the step counts the same."""
    # A step in which nothing is left to learn from has loss 0, not 0/0.
    return share.only(values_N).sum() / max(share.tokens, 1)


def seq_mean_token_sum(values_N: torch.Tensor, share: LossNormalizer) -> torch.Tensor:
    """The sum over a trajectory's tokens, averaged over trajectories."""
    return share.only(values_N).sum() / max(share.sequences, 1)


def seq_mean_token_mean(values_N: torch.Tensor, share: LossNormalizer) -> torch.Tensor:
    """Every trajectory of the step counts the same, however long it is."""
    return (share.only(values_N) / spread(share.counts_R, share.lengths)).sum() / max(share.sequences, 1)


def seq_mean_token_sum_norm(values_N: torch.Tensor, share: LossNormalizer) -> torch.Tensor:
    """The sum over a trajectory's tokens divided by a constant, averaged over trajectories (Dr. GRPO)."""
    if share.horizon is None:
        raise ValueError(
            "seq-mean-token-sum-norm divides by a constant: set `horizon`, "
            "for example to the longest response in tokens"
        )
    return seq_mean_token_sum(values_N, share) / share.horizon


AGGREGATIONS: dict[str, Callable[[torch.Tensor, LossNormalizer], torch.Tensor]] = {
    "token-mean": token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}
