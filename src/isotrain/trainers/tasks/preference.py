"""The part of preference training that all algorithms share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from isotrain.data.loader import StepData
from isotrain.data.packing import PackedBatch
from isotrain.engine.engine import Objective, TrainingEngine, UpdateResult

Work = Sequence[tuple[PackedBatch, Objective]]
"""A step's micro-batches, each with its objective: shares of the step's loss and metrics."""


def _items(data: StepData) -> int:
    return data.items


@dataclass(frozen=True)
class PreferenceTask:
    engine: TrainingEngine
    work: Callable[[StepData], Work]
    metrics: Callable[[dict[str, float]], dict[str, float]]
    """From summed shares to metrics."""
    size: Callable[[StepData], int] = _items
    """What the shares of a step are divided by."""

    def update(self, data: StepData, lr: float) -> UpdateResult:
        result = self.engine.update(self.work(data), lr)
        return replace(result, metrics=self.metrics(result.metrics))

    def evaluate(self, steps: Iterable[StepData]) -> dict[str, float]:
        """Means over all steps, each of which counts by its size."""
        totals: dict[str, float] = {}
        weight = 0
        for data in steps:
            shares: Counter[str] = Counter()
            for packed, objective in self.work(data):
                ((loss, metrics),) = self.engine.infer([packed], objective)
                shares.update(
                    {"loss": loss.item(), **{name: value.item() for name, value in metrics.items()}}
                )
            for name, total in zip(shares, self.engine.world.sum(list(shares.values())), strict=True):
                totals[name] = totals.get(name, 0.0) + total * self.size(data)
            weight += self.size(data)
        return self.metrics({name: total / weight for name, total in totals.items()})
