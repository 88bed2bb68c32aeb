"""Responses without a score: counted by cause, reported at a bounded rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from isotrain.reward.base import FAILURES
from isotrain.trainers.online.messages import Group

# The first few show what is wrong. Later only much worse steps are reported; the metrics count all.
TOLD_FIRST = 3
STEPS_BETWEEN = 10


@dataclass(frozen=True)
class Failures:
    """Of some responses: how many there are, how many have no score by cause, and why the first of these."""

    responses: int = 0
    causes: Mapping[str, int] = field(default_factory=dict)
    first: str = ""

    @property
    def count(self) -> int:
        return sum(self.causes.values())

    @property
    def share(self) -> float:
        return self.count / self.responses if self.responses else 0.0

    def plus(self, other: Failures) -> Failures:
        causes = Counter(self.causes) + Counter(other.causes)
        return Failures(self.responses + other.responses, causes, self.first or other.first)

    def metrics(self) -> dict[str, float]:
        names = {"timeout": "reward/timeouts", "crash": "reward/crashes", "error": "reward/errors"}
        by_cause = {names[cause]: float(self.causes.get(cause, 0)) for cause in FAILURES}
        return {"reward/failures": float(self.count), **by_cause}

    def as_counts(self) -> dict[str, int]:
        """As a recording keeps them."""
        return {"responses": self.responses, **self.causes} if self.responses else {}

    def __str__(self) -> str:
        return f"{self.count} of {self.responses} responses got no score; the first because of {self.first}"


def failures_of(groups: Iterable[Group]) -> Failures:
    scores = [score for group in groups for score in group.scores]
    failed = [score for score in scores if score.failure is not None]
    first = f"{failed[0].failure}: {failed[0].detail}" if failed else ""
    return Failures(len(scores), Counter(str(score.failure) for score in failed), first)


def recorded_failures(counts: Mapping[str, int]) -> Failures:
    causes: dict[str, int] = {cause: counts[cause] for cause in FAILURES if counts.get(cause)}
    first = f"{next(iter(causes))}: in a response that was not recorded" if causes else ""
    return Failures(counts.get("responses", 0), causes, first)


@dataclass
class Warnings:
    """When failures of one kind of response are reported: the first few, then twice as many, or all."""

    told: int = 0
    worst: float = 0.0
    """The largest reported fraction."""
    last: int = 0
    """The last reported step."""

    def is_due(self, step: int, failures: Failures) -> bool:
        """Whether to report this step's failures now; remembers it if so."""
        worse = failures.share == 1.0 or failures.share >= 2 * self.worst
        soon = self.told >= TOLD_FIRST and step < self.last + STEPS_BETWEEN
        if not failures.count or soon or (self.told >= TOLD_FIRST and not worse):
            return False
        self.told, self.last = self.told + 1, step
        self.worst = max(self.worst, failures.share)
        return True
