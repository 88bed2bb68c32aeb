"""From what the levels found to one verdict: the same training, a different one, or cannot tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from isotrain.parity.compare import Comparison
from isotrain.parity.levels import LEVELS, Level, not_run

Outcome = Literal["same", "different", "cannot tell"]

EXIT_CODES: dict[Outcome, int] = {"same": 0, "different": 1, "cannot tell": 2}
# Levels that follow a whole run: without one of them saying `same`, nobody has seen the training.
_WHOLE_RUNS = ("P2", "P3", "P4")


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    words: str
    """A paragraph for people, before any figure."""
    levels: tuple[Level, ...]
    """All of `LEVELS`, in their order."""
    comparison: Comparison = field(repr=False)

    def __str__(self) -> str:
        return self.words

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    def level(self, name: str) -> Level:
        return next(level for level in self.levels if level.name == name)

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.outcome,
            "words": self.words,
            "levels": [asdict(level) for level in self.levels],
            "comparison": self.comparison.as_json(),
        }


def judge(comparison: Comparison, found: Iterable[Level]) -> Verdict:
    """The verdict over the levels that were run; the others are shown as not run."""
    by_name = {level.name: level for level in found}
    levels = tuple(by_name.get(name) or not_run(name) for name in LEVELS)
    outcome = _outcome(comparison, levels)
    return Verdict(outcome, _words(outcome, comparison, levels), levels, comparison)


def _outcome(comparison: Comparison, levels: tuple[Level, ...]) -> Outcome:
    if not comparison.comparable:
        return "cannot tell"
    states = {level.name: level.state for level in levels}
    if "different" in states.values():
        return "different"
    # Curves alone may leave it open, which the envelope then decides.
    undecided = [name for name, state in states.items() if state == "cannot tell" and name != "P2"]
    seen = any(states[name] == "same" for name in _WHOLE_RUNS)
    return "same" if seen and not undecided else "cannot tell"


def _words(outcome: Outcome, comparison: Comparison, levels: tuple[Level, ...]) -> str:
    if not comparison.comparable:
        return "These two runs cannot be compared: " + "; ".join(o.message for o in comparison.obstacles)
    ran = [level for level in levels if level.state != "not run"]
    if outcome == "same":
        return "These two runs are the same training: " + _sentences(ran)
    if outcome == "different":
        against = [level for level in ran if level.state == "different"]
        causes = list(dict.fromkeys(cause for level in against for cause in level.causes))
        likely = f" Likely causes: {'; '.join(causes)}." if causes else ""
        return "These two runs are not the same training: " + _sentences(against) + likely
    return "It cannot be told whether these two runs are the same training: " + _sentences(ran)


def _sentences(levels: Iterable[Level]) -> str:
    return "; ".join(level.words for level in levels) + "."
