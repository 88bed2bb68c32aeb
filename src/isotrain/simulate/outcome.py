"""What a simulated run tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the ranks in one step, part by part, and what the step trained on."""

    generation: float
    """Waiting for the last response."""
    reward: float
    """Waiting for scores, and for the controller to collect them, after that."""
    controller: float
    switch: float
    update: float
    sync: float
    responses: int
    tokens: int
    longest: int
    staleness: int
    """Of the oldest response, in versions."""

    @property
    def total(self) -> float:
        return self.generation + self.reward + self.controller + self.switch + self.update + self.sync


PARTS = ("generation", "reward", "controller", "switch", "update", "sync")


@dataclass(frozen=True)
class Outcome:
    steps: Sequence[StepTimes]
    """All of them."""
    warm_up: int
    """Steps that the means leave out."""
    engines_idle: float
    """Share of the engines' time after the first steps with no sequence and no weights to load."""
    engines_filled: float
    """Running sequences over places, mean over time and engines."""
    generated: int
    """Responses that engines have finished."""
    generated_tokens: int

    @property
    def measured(self) -> Sequence[StepTimes]:
        return self.steps[self.warm_up :]

    @property
    def step_seconds(self) -> float:
        return mean(step.total for step in self.measured)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step, by part."""
        return {part: mean(getattr(step, part) for step in self.measured) for part in PARTS}

    @property
    def ranks_idle(self) -> float:
        """Share of the ranks' time without an update or a sync."""
        return 1.0 - (self.parts["update"] + self.parts["sync"]) / self.step_seconds

    @property
    def responses_per_second(self) -> float:
        return sum(step.responses for step in self.measured) / sum(step.total for step in self.measured)

    @property
    def staleness(self) -> int:
        return max(step.staleness for step in self.steps)
