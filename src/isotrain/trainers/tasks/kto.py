"""Learning from responses that are each desirable or not.

S: samples of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from isotrain.algorithms.aggregate import Loss
from isotrain.algorithms.preference.kto import kto, reference_point
from isotrain.algorithms.segments import sums
from isotrain.data.loader import MicroBatch, StepData
from isotrain.engine.engine import Objective, TrainingEngine
from isotrain.models.head import TokenHead
from isotrain.trainers.tasks.preference import Work
from isotrain.trainers.tasks.reference import Reference, response_logps


@dataclass(frozen=True)
class KtoWork:
    engine: TrainingEngine
    reference: Reference
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, data: StepData) -> Work:
        kl = self._reference_point(data)
        references = self.reference(data.batches)
        return [
            (batch.packed, self._objective(batch, ref_logp_S, kl, data.items))
            for batch, ref_logp_S in zip(data.batches, references, strict=True)
        ]

    def _reference_point(self, data: StepData) -> float:
        policy = response_logps(self.engine, data.mismatched)
        reference = self.reference(data.mismatched)
        own = sum((p - r).sum().item() for p, r in zip(policy, reference, strict=True))
        return reference_point(self.engine.world.sum([own])[0], data.items)

    def _objective(self, batch: MicroBatch, ref_logp_S: torch.Tensor, kl: float, responses: int) -> Objective:
        def objective(head: TokenHead) -> Loss:
            logp_S = sums(head.logps(), batch.lengths)
            desirable_S = batch.values_V.to(logp_S.device) > 0.5
            loss, metrics = kto(logp_S, ref_logp_S, desirable_S, kl=kl, responses=responses, **self.options)
            share = len(batch.numbers) / responses  # of the step, so that the sum is `kl` itself
            return loss, {**metrics, "kl": torch.tensor(kl * share, device=logp_S.device)}

        return objective
