"""The interface of rewards: responses in, scores out in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Failure = Literal["timeout", "crash", "error"]
FAILURES: tuple[Failure, ...] = ("timeout", "crash", "error")
# Of a float32, as which scores are learnt from: a larger one would be infinite there.
LARGEST_SCORE = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True)
class RewardInput:
    """A response, with the data row of its prompt."""

    response: str
    answer: Any
    """The reference answer of the row."""
    row: Mapping[str, Any] = field(default_factory=dict)
    environment: Scored | None = None
    """The environment's reward, where the policy acted in one that gives rewards."""


@dataclass(frozen=True)
class Scored:
    score: float
    parts: dict[str, float] = field(default_factory=dict)
    """Each reward before its weight, by name; those that failed are not in it."""
    failure: Failure | None = None
    detail: str = ""
    """For a failure, one printable line about it; it may quote the model."""


class Scorer(Protocol):
    def start(self) -> None:
        """Start what is needed now rather than with the first items; raises `RewardError`."""

    def score(self, items: Sequence[RewardInput]) -> list[Scored]:
        """One result for each item, in their order; a failed item is a result too."""

    def close(self) -> None:
        """End every process; may be called twice."""
