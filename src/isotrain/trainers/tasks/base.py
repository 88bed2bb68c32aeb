"""The interface between the supervised loop and its tasks; supervised fine-tuning is the simplest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from isotrain.data.loader import StepData
from isotrain.engine.engine import Loss, TrainingEngine, UpdateResult

Step = TypeVar("Step", contravariant=True)


class Task(Protocol[Step]):
    def update(self, data: Step, lr: float) -> UpdateResult:
        """Learn from one step; `metrics` of the result are means over it."""

    def evaluate(self, steps: Iterable[Step]) -> dict[str, float]:
        """Loss and metrics over all given steps, without learning."""


@dataclass(frozen=True)
class SftTask:
    engine: TrainingEngine
    loss: Loss

    def update(self, data: StepData, lr: float) -> UpdateResult:
        return self.engine.step([batch.packed for batch in data.batches], self.loss, lr)

    def evaluate(self, steps: Iterable[StepData]) -> dict[str, float]:
        batches = ([batch.packed for batch in step.batches] for step in steps)
        return {"loss": self.engine.evaluate(batches, self.loss)}
