"""A machine with a device and a recipe, and findings; known problems as data, and when a rule applies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from pydantic import Field, TypeAdapter, field_validator

from isotrain.language import tr
from isotrain.recipe.online import ClusterSection
from isotrain.recipe.schema import Recipe
from isotrain.tools.doctor.facts import PACKAGES, MachineFacts
from isotrain.tools.doctor.matrix import StrictModel, Target, fits, matrix, packaged, satisfies, specifier

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class MachineFinding:
    id: str
    level: Level
    """`error`: training fails or is wrong; `warning`: it may; `note`: good to know."""
    problem: str
    remedy: str


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
    "flash": lambda recipe: recipe.model.attention in ("auto", "flash") and recipe.model.dtype != "float32",
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


class When(StrictModel):
    """Everything that is given must hold."""

    device: Target | None = None
    packages: dict[str, str] = Field(default_factory=dict)
    cann: str | None = None
    hdk: str | None = None
    hardware: tuple[str, ...] = ()
    machine: Literal["aarch64", "x86_64"] | None = None
    variables: dict[str, str] = Field(default_factory=dict)
    recipe: tuple[str, ...] = ()

    @field_validator("packages")
    @classmethod
    def _are_looked_at(cls, packages: dict[str, str]) -> dict[str, str]:
        for name, condition in packages.items():
            if name not in PACKAGES:
                raise ValueError(f"facts.PACKAGES lacks {name}")
            if condition not in ("present", "absent"):
                specifier(condition)
        return packages

    @field_validator("variables")
    @classmethod
    def _are_patterns(cls, variables: dict[str, str]) -> dict[str, str]:
        for pattern in variables.values():
            re.compile(pattern)
        return variables

    @field_validator("recipe")
    @classmethod
    def _are_needs(cls, needs: tuple[str, ...]) -> tuple[str, ...]:
        unknown = set(needs) - set(NEEDS)
        if unknown:
            raise ValueError(f"no recipe needs {', '.join(sorted(unknown))}")
        return needs

    def holds(self, scene: Scene) -> bool:
        facts = scene.facts
        return (
            self.device in (None, scene.target)
            and self.machine in (None, facts.machine)
            and (not self.hardware or scene.generation in self.hardware)
            and _version_holds(facts.cann, self.cann, present=facts.cann_home is not None)
            and _version_holds(facts.driver, self.hdk, present=facts.driver is not None)
            and all(
                _package_holds(facts.packages.get(k), condition) for k, condition in self.packages.items()
            )
            and all(
                _variable_holds(facts.variables.get(k), condition) for k, condition in self.variables.items()
            )
            # Without a recipe, it is not known that the trouble will not come.
            and (scene.needs is None or scene.needs.issuperset(self.recipe))
        )


class KnownProblem(StrictModel):
    id: str
    level: Level
    complaint: int | None = None
    when: When
    symptom: str
    fix: str
    source: str


@lru_cache(maxsize=1)
def rules() -> tuple[KnownProblem, ...]:
    """The rules that come with this version."""
    return TypeAdapter(tuple[KnownProblem, ...]).validate_python(packaged("rules.yaml"))


def apply(scene: Scene) -> Iterator[MachineFinding]:
    """Findings of the rules that apply to a machine."""
    for rule in rules():
        if rule.when.holds(scene):
            level = LEVELS.index(rule.level)
            if rule.when.recipe and scene.needs is None:  # unsure: one level below
                level = min(level + 1, len(LEVELS) - 1)
            yield MachineFinding(rule.id, LEVELS[level], tr(rule.symptom), tr(rule.fix))


def _version_holds(version: str | None, condition: str | None, present: bool) -> bool:
    if condition in (None, "present", "absent"):
        return condition is None or present == (condition == "present")
    return version is not None and satisfies(version, condition)


def _package_holds(version: str | None, condition: str) -> bool:
    if condition == "absent" or version is None:
        return condition == "absent" and version is None
    return condition == "present" or fits(version, condition)


def _variable_holds(value: str | None, condition: str) -> bool:
    if condition in ("set", "unset"):
        return bool(value) == (condition == "set")
    return re.fullmatch(condition, value or "") is not None
