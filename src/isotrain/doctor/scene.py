"""A machine together with what is wanted of it: what rules and checks look at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from isotrain.doctor.facts import Facts
from isotrain.doctor.matrix import Target, matrix
from isotrain.doctor.needs import needs_of
from isotrain.recipe.schema import Recipe


@dataclass(frozen=True)
class Scene:
    facts: Facts
    target: Target
    recipe: Recipe | None = None

    @cached_property
    def needs(self) -> frozenset[str] | None:
        """What the recipe needs; None without a recipe."""
        return None if self.recipe is None else needs_of(self.recipe)

    @property
    def generation(self) -> str | None:
        """Of the first device; machines with two kinds are not built."""
        return matrix().generation(self.facts.npus[0].name) if self.facts.npus else None


def likely_target(facts: Facts) -> Target:
    """The device that somebody who installed all this wants to use."""
    if "torch-npu" in facts.packages or facts.cann or facts.npu_devices or facts.npus:
        return "npu"
    if facts.gpus or "+cu" in facts.packages.get("torch", ""):
        return "cuda"
    return "cpu"
