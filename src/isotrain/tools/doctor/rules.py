"""Known problems as data: when a rule applies to a machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from pydantic import Field, TypeAdapter, field_validator

from isotrain.language import tr
from isotrain.tools.doctor.facts import PACKAGES
from isotrain.tools.doctor.matrix import StrictModel, Target, fits, packaged, satisfies, specifier
from isotrain.tools.doctor.scene import NEEDS, Level, MachineFinding, Scene, milder


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
            unsure = bool(rule.when.recipe) and scene.needs is None
            level = milder(rule.level) if unsure else rule.level
            yield MachineFinding(rule.id, level, tr(rule.symptom), tr(rule.fix))


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
