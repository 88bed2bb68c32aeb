"""Scores of whole samples by a reward model.

S: samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from isotrain.data.packing import PackedBatch
from isotrain.engine.inference_model import InferenceModel
from isotrain.models.scalar import ScalarHead


def score_samples(model: InferenceModel, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
    """`scores_S` of each micro-batch, float32 on the device: the model's output at each last token.

    The stand-in of an empty micro-batch has a score too, which means nothing.
    """
    return model.infer([at_last_tokens(batch) for batch in batches], ScalarHead.values)


def at_last_tokens(batch: PackedBatch) -> PackedBatch:
    """The batch with only each sample's last token selected."""
    last_S = batch.last_S
    return replace(batch, predict_N=last_S, targets_N=batch.tokens_T[last_S])
