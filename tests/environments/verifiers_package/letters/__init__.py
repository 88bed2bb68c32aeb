"""An environment for verifiers 0.4: say letters of a kind, twice."""

from letters.harness import LettersHarness
from letters.taskset import LettersTaskset

__all__ = ["LettersHarness", "LettersTaskset"]
