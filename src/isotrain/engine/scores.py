"""Scores by models: of whole samples at their last tokens, of steps at their ends.

S: samples of a micro-batch, N: ends of its steps, D: hidden size, C: bad and good, V: all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from isotrain.algorithms.preference_losses import two_classes
from isotrain.data.packing import PackedBatch
from isotrain.engine.engine import InferenceModel
from isotrain.models.packed import ScalarHead, TokenHead


def score_samples(model: InferenceModel, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
    """`scores_S` of each micro-batch, float32 on the device: the model's output at each last token.

    The stand-in of an empty micro-batch has a score too, which means nothing.
    """
    return model.infer([at_last_tokens(batch) for batch in batches], ScalarHead.values)


def at_last_tokens(batch: PackedBatch) -> PackedBatch:
    """The batch with only each sample's last token selected."""
    last_S = batch.last_S
    return replace(batch, predict_N=last_S, targets_N=batch.tokens_T[last_S], predict_on_host_N=None)


StepScores = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
"""From a model's head to the log-probs of bad and of good, `logq_bad_N` and `logq_good_N`."""


def of_classes(head: ScalarHead) -> tuple[torch.Tensor, torch.Tensor]:
    """A token classifier's."""
    return two_classes(head.logits())


def of_tokens(bad: int, good: int) -> StepScores:
    """A language model's, of two tokens that are compared with each other alone."""

    def step_scores(head: TokenHead) -> tuple[torch.Tensor, torch.Tensor]:
        return two_classes(head.logits_of([bad, good]))

    return step_scores


def among_all_tokens(bad: int, good: int) -> StepScores:
    """A language model's, of two tokens that are compared with all others as well."""

    def logps(head: TokenHead, token: int) -> torch.Tensor:
        return replace(head, targets_N=torch.full_like(head.targets_N, token)).logps()

    return lambda head: (logps(head, bad), logps(head, good))


def at_ends(batch: PackedBatch) -> PackedBatch:
    """Read the model at the marked tokens themselves, and not at the ones that predict them."""
    end_N = batch.predict_N + 1
    return replace(batch, predict_N=end_N, targets_N=batch.tokens_T[end_N], predict_on_host_N=None)


def score_steps(
    model: InferenceModel, batches: Sequence[PackedBatch], step_scores: StepScores
) -> list[torch.Tensor]:
    """The probability that each step is good, `good_N` of each micro-batch, in float32 on the device."""

    def probability(head: Any) -> torch.Tensor:
        logq_bad_N, logq_good_N = step_scores(head)
        return torch.sigmoid(logq_good_N - logq_bad_N)

    return model.infer([at_ends(batch) for batch in batches], probability)
