"""The interface of a supervised task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from isotrain.engine.engine import UpdateResult

Step = TypeVar("Step", contravariant=True)


class Task(Protocol[Step]):
    def update(self, data: Step, lr: float) -> UpdateResult:
        """Learn from one step; `metrics` of the result are means over it."""

    def evaluate(self, steps: Iterable[Step]) -> dict[str, float]:
        """Loss and metrics over all given steps, without learning."""
