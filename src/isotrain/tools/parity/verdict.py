"""The two answers about a pair of runs: do they end up alike, and is it the same computation?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from isotrain.language import listed
from isotrain.tools.parity.compare.comparison import Comparison
from isotrain.tools.parity.compare.effects import Answer
from isotrain.tools.parity.compare.outcome import Outcome
from isotrain.tools.parity.levels.level import LEVELS, Level, not_run

Same = Literal["same", "different", "inconclusive"]
Question = Literal["outcome", "computation"]

# 2 is what commands end with that cannot be carried out, such as for a log that cannot be read.
EXIT_CODES: dict[Answer | Same, int] = {"equivalent": 0, "same": 0, "different": 1, "inconclusive": 3}
# Levels that follow a whole run: without one of them saying `same`, nobody has seen the training.
_WHOLE_RUNS = ("P2", "P3")


@dataclass(frozen=True)
class Computation:
    verdict: Same
    levels: tuple[Level, ...]
    """All of `LEVELS`, in their order."""
    inputs: tuple[str, ...] = ()
    """Inputs of the runs that differ, in words."""
    broken: tuple[str, ...] = ()
    """Metrics that are not a number on one side, in words."""

    def level(self, name: str) -> Level:
        return next(level for level in self.levels if level.name == name)

    @property
    def causes(self) -> tuple[str, ...]:
        """Possible causes of a difference, most likely first."""
        against = [level for level in self.levels if level.state == "different"]
        return tuple(dict.fromkeys(cause for level in against for cause in level.causes))

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "inputs": list(self.inputs),
            "broken": list(self.broken),
            "causes": list(self.causes),
            "levels": [asdict(level) for level in self.levels],
        }


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    computation: Computation
    comparison: Comparison = field(repr=False)

    def __str__(self) -> str:
        return self.words

    @property
    def words(self) -> str:
        """Both answers for people, before any figure."""
        from isotrain.tools.parity.report.headline import headline

        return headline(self)

    def exit_code(self, question: Question = "outcome") -> int:
        """0 positive, 1 different, 3 inconclusive."""
        asked = self.outcome if question == "outcome" else self.computation
        return EXIT_CODES[asked.verdict]

    def level(self, name: str) -> Level:
        return self.computation.level(name)

    def as_json(self) -> dict[str, Any]:
        return {
            "words": self.words,
            "outcome": self.outcome.as_json(),
            "computation": self.computation.as_json(),
            "comparison": self.comparison.as_json(),
        }


def judge(comparison: Comparison, outcome: Outcome, levels_run: Iterable[Level]) -> Verdict:
    """The levels that were not run are shown as not run."""
    by_name = {level.name: level for level in levels_run}
    levels = tuple(by_name.get(name) or not_run(name) for name in LEVELS)
    inputs = tuple(difference.message for difference in comparison.differences)
    broken = tuple(value.words for value in comparison.not_numbers if value.one_sided)
    flat = tuple(listed((effect.metric, effect.reason), ": ") for effect in outcome.effects if effect.reason)
    verdict = "different" if inputs or broken or flat else _computation(levels)
    if verdict == "same" and comparison.not_numbers:
        verdict = "inconclusive"
    return Verdict(outcome, Computation(verdict, levels, inputs, (*broken, *flat)), comparison)


def _computation(levels: tuple[Level, ...]) -> Same:
    """Nothing cancels a difference that one level found."""
    states = {level.name: level.state for level in levels}
    if "different" in states.values():
        return "different"
    # Curves alone may leave it open, which the envelope then decides.
    undecided = [name for name, state in states.items() if state == "cannot tell" and name != "P2"]
    seen = any(states[name] == "same" for name in _WHOLE_RUNS) or _is_right_by_itself(levels)
    return "same" if seen and not undecided else "inconclusive"


def _is_right_by_itself(levels: tuple[Level, ...]) -> bool:
    """Operators and a step in float32 that were held against float64: what both runs do is right."""
    operators, steps = (next(level for level in levels if level.name == name) for name in ("P0", "P1"))
    in_float32 = steps.evidence.get("against float64") == "float32"
    return operators.state == steps.state == "same" and in_float32
