"""Log-probs of responses under the policy as it was before training.

S: samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from isotrain.algorithms.segments import sums
from isotrain.data.loader import MicroBatch
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.inference_model import InferenceModel
from isotrain.models.lora import adapters_off

Reference = Callable[[Sequence[MicroBatch]], list[torch.Tensor]]
"""From micro-batches to the summed log-probs of each of their samples, `logp_S`."""


def response_logps(
    model: TrainingEngine | InferenceModel, batches: Sequence[MicroBatch]
) -> list[torch.Tensor]:
    """The summed log-probs of each sample's response; ranks must bring equally many micro-batches."""
    found = model.infer([batch.packed for batch in batches], lambda head: head.logps())
    return [sums(logp_N, batch.lengths) for batch, logp_N in zip(batches, found, strict=True)]


def without_adapters(engine: TrainingEngine) -> Reference:
    """The policy's own base model: adapters are all that learns."""

    def reference(batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        with adapters_off(engine.model):
            return response_logps(engine, batches)

    return reference


def beside(model: InferenceModel) -> Reference:
    """A second model that stays as it is."""
    return lambda batches: response_logps(model, batches)


def precomputed(device: torch.device) -> Reference:
    """The loader's cached log-probs."""

    def reference(batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        found = [batch.ref_logp_S for batch in batches]
        return [logp_S.to(device) for logp_S in found if logp_S is not None]

    return reference
