"""Learning from pairs: a policy that prefers the chosen responses, or a reward model that scores them higher.

S: samples of a micro-batch, chosen and rejected in turn; P: its pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from isotrain.algorithms.aggregate import Loss
from isotrain.algorithms.preference.pairs import PairLosses, Side, shares
from isotrain.algorithms.preference.reward_model import rm
from isotrain.algorithms.segments import sums
from isotrain.data.loader import MicroBatch, StepData
from isotrain.engine.engine import Objective
from isotrain.engine.scores import at_last_tokens
from isotrain.models.head import TokenHead
from isotrain.models.scalar import ScalarHead
from isotrain.trainers.tasks.preference import Work
from isotrain.trainers.tasks.reference import Reference


@dataclass(frozen=True)
class DpoWork:
    loss: Callable[..., PairLosses]
    options: dict[str, Any]
    reference: Reference | None
    """None for losses that have none."""

    def __call__(self, data: StepData) -> Work:
        references: list[torch.Tensor | None] = [None] * len(data.batches)
        if self.reference is not None:
            references = list(self.reference(data.batches))
        return [
            (batch.packed, self._objective(batch, ref_logp_S, data.items))
            for batch, ref_logp_S in zip(data.batches, references, strict=True)
        ]

    def _objective(self, batch: MicroBatch, ref_logp_S: torch.Tensor | None, pairs: int) -> Objective:
        def objective(head: TokenHead) -> Loss:
            logp_S = sums(head.logps(), batch.lengths)
            tokens_S = torch.tensor(batch.lengths, device=logp_S.device)
            chosen, rejected = (
                Side(logp_S[side::2], None if ref_logp_S is None else ref_logp_S[side::2], tokens_S[side::2])
                for side in (0, 1)
            )
            return shares(self.loss(chosen, rejected, **self.options), pairs)

        return objective


@dataclass(frozen=True)
class RmWork:
    margins: bool
    """Whether the items' labels are margins to be used."""
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, data: StepData) -> Work:
        return [(at_last_tokens(batch.packed), self._objective(batch, data.items)) for batch in data.batches]

    def _objective(self, batch: MicroBatch, pairs: int) -> Objective:
        def objective(head: ScalarHead) -> Loss:
            # The stand-in of an empty micro-batch has a score as well, which belongs to no pair.
            scores_S = head.values()[: 2 * len(batch.numbers)]
            margin_P = batch.values_V.to(scores_S.device) if self.margins else None
            return shares(rm(scores_S[0::2], scores_S[1::2], margin_P=margin_P, **self.options), pairs)

        return objective
