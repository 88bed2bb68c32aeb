"""Supervised fine-tuning as a task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from isotrain.data.loader import StepData
from isotrain.engine.engine import Loss, TrainingEngine, UpdateResult


@dataclass(frozen=True)
class SftTask:
    engine: TrainingEngine
    loss: Loss

    def update(self, data: StepData, lr: float) -> UpdateResult:
        return self.engine.step([batch.packed for batch in data.batches], self.loss, lr)

    def evaluate(self, steps: Iterable[StepData]) -> dict[str, float]:
        batches = ([batch.packed for batch in step.batches] for step in steps)
        return {"loss": self.engine.evaluate(batches, self.loss)}
