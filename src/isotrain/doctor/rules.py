"""Known problems as data: when a rule applies to a machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from pydantic import Field, TypeAdapter, field_validator

from isotrain.doctor.facts import PACKAGES
from isotrain.doctor.findings import Finding, Level, milder
from isotrain.doctor.matrix import Row, Target, fits, packaged, specifier
from isotrain.doctor.scene import NEEDS, Scene
from isotrain.doctor.versions import satisfies
from isotrain.language import tr


class When(Row):
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
        for name, wanted in packages.items():
            if name not in PACKAGES:
                raise ValueError(f"facts.PACKAGES lacks {name}")
            if wanted not in ("present", "absent"):
                specifier(wanted)
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
            and all(_package_holds(facts.packages.get(k), wanted) for k, wanted in self.packages.items())
            and all(_variable_holds(facts.variables.get(k), wanted) for k, wanted in self.variables.items())
            # Without a recipe, it is not known that the trouble will not come.
            and (scene.needs is None or scene.needs.issuperset(self.recipe))
        )


class Rule(Row):
    id: str
    level: Level
    complaint: int | None = None
    when: When
    symptom: str
    fix: str
    source: str


@lru_cache(maxsize=1)
def rules() -> tuple[Rule, ...]:
    """The rules that come with this version."""
    return TypeAdapter(tuple[Rule, ...]).validate_python(packaged("rules.yaml"))


def apply(scene: Scene) -> Iterator[Finding]:
    """What the rules say about a machine."""
    for rule in rules():
        if rule.when.holds(scene):
            unsure = bool(rule.when.recipe) and scene.needs is None
            level = milder(rule.level) if unsure else rule.level
            yield Finding(rule.id, level, tr(rule.symptom), tr(rule.fix))


def _version_holds(version: str | None, wanted: str | None, present: bool) -> bool:
    if wanted in (None, "present", "absent"):
        return wanted is None or present == (wanted == "present")
    return version is not None and satisfies(version, wanted)


def _package_holds(version: str | None, wanted: str) -> bool:
    if wanted == "absent" or version is None:
        return wanted == "absent" and version is None
    return wanted == "present" or fits(version, wanted)


def _variable_holds(value: str | None, wanted: str) -> bool:
    if wanted in ("set", "unset"):
        return bool(value) == (wanted == "set")
    return re.fullmatch(wanted, value or "") is not None
