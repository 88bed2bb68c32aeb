"""What every task of a supervised run offers the loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from isotrain.data.packing import PackedBatch
from isotrain.engine.engine import Objective, TrainingEngine, UpdateResult

Step = TypeVar("Step", contravariant=True)
Work = Sequence[tuple[PackedBatch, Objective]]


class Task(Protocol[Step]):
    def update(self, data: Step, lr: float) -> UpdateResult:
        """Learn from one step; `metrics` of the result are means over it."""

    def evaluate(self, steps: Iterable[Step]) -> dict[str, float]:
        """Loss and metrics over all given steps, without learning."""


def evaluate(
    engine: TrainingEngine, steps: Iterable[Any], work: Callable[[Any], Work], size: Callable[[Any], int]
) -> dict[str, float]:
    """Means over steps of `size`, of losses and metrics that are shares of each step's means."""
    totals: dict[str, float] = {}
    weight = 0
    for data in steps:
        shares: Counter[str] = Counter()
        for packed, objective in work(data):
            ((loss, metrics),) = engine.infer([packed], objective)
            shares.update({"loss": loss.item(), **{name: value.item() for name, value in metrics.items()}})
        for name, total in zip(shares, engine.world.sum(list(shares.values())), strict=True):
            totals[name] = totals.get(name, 0.0) + total * size(data)
        weight += size(data)
    return {name: total / weight for name, total in totals.items()}
