"""Input and output of rules and checks: a machine with a device and a recipe, and findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from isotrain.recipe.online import ClusterSection
from isotrain.recipe.schema import Recipe
from isotrain.tools.doctor.facts import MachineFacts
from isotrain.tools.doctor.matrix import Target, matrix

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class MachineFinding:
    id: str
    level: Level
    """`error`: training fails or is wrong; `warning`: it may; `note`: good to know."""
    problem: str
    remedy: str


def milder(level: Level) -> Level:
    """The next level below."""
    return LEVELS[min(LEVELS.index(level) + 1, len(LEVELS) - 1)]


def _engine(recipe: Recipe) -> str | None:
    return recipe.rollout.engine if recipe.rollout and recipe.rollout.generates else None


def _cluster(recipe: Recipe) -> ClusterSection:
    return recipe.cluster or ClusterSection()


# By the names under which rules ask for them.
NEEDS: dict[str, Callable[[Recipe], bool]] = {
    "online": lambda recipe: recipe.rollout is not None,
    "vllm": lambda recipe: _engine(recipe) == "vllm",
    "sglang": lambda recipe: _engine(recipe) == "sglang",
    "sleep": lambda recipe: (
        _engine(recipe) in ("vllm", "sglang") and _cluster(recipe).placement == "colocated"
    ),
    "a given Ray cluster": lambda recipe: (
        recipe.rollout is not None and _cluster(recipe).address not in ("auto", "local")
    ),
    "several ranks": lambda recipe: (
        recipe.device.ranks > 1 or (recipe.rollout is not None and recipe.rollout.tensor_parallel > 1)
    ),
    "flash": lambda recipe: recipe.model.attention in ("auto", "flash") and recipe.model.dtype == "bfloat16",
    "float32": lambda recipe: recipe.model.dtype == "float32",
}


@dataclass(frozen=True)
class Scene:
    facts: MachineFacts
    target: Target
    recipe: Recipe | None = None

    @cached_property
    def needs(self) -> frozenset[str] | None:
        """Needs of the recipe; None without a recipe."""
        recipe = self.recipe
        return None if recipe is None else frozenset(name for name, has in NEEDS.items() if has(recipe))

    @property
    def generation(self) -> str | None:
        """Generation of the first device; machines with two kinds are not built."""
        return matrix().chips.get(self.facts.npus[0].name) if self.facts.npus else None


def likely_target(facts: MachineFacts) -> Target:
    """The device that the installed packages suggest."""
    if "torch-npu" in facts.packages or facts.cann or facts.npu_devices or facts.npus:
        return "npu"
    if facts.gpus or "+cu" in facts.packages.get("torch", ""):
        return "cuda"
    return "cpu"
