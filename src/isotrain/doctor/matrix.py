"""The support matrix: which versions were published as a working stack."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, field_validator

Target = Literal["npu", "cuda", "cpu"]
TARGETS: tuple[Target, ...] = ("npu", "cuda", "cpu")
Status = Literal["verified", "published", "end of life", "unverified"]


class Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stack(Row):
    """Versions that were published together."""

    name: str
    device: Target
    hardware: tuple[str, ...] = ()
    """Generations of machines, as `chips` names them."""
    boxes: tuple[str, ...] = ()
    """The publisher's names of the machines."""
    hdk: str | None = None
    """Driver."""
    cann: str | None = None
    python: str | None = None
    packages: dict[str, str]
    """Exact versions, or ranges."""
    arm: dict[str, str] = Field(default_factory=dict)
    x86: dict[str, str] = Field(default_factory=dict)
    no_deps: tuple[str, ...] = ()
    """Packages to install with `--no-deps`: their wheels ask for other versions than the stack's."""
    unsupported: tuple[str, ...] = ()
    requirements: str | None = None
    """The file with all packages of the stack."""
    checked: str | None = None
    """The day when the published wheels' metadata was seen to agree with the row."""
    status: Status
    source: str

    @field_validator("packages", "arm", "x86")
    @classmethod
    def _are_versions(cls, packages: dict[str, str]) -> dict[str, str]:
        for wanted in packages.values():
            specifier(wanted)
        return packages

    def packages_on(self, machine: str) -> dict[str, str]:
        """All packages on a type of machine, as `uname -m` calls it."""
        return self.packages | (self.arm if machine == "aarch64" else self.x86)


class Matrix(Row):
    stacks: tuple[Stack, ...]
    torch_npu_of_cann: dict[str, tuple[str, ...]]
    cuda_driver: dict[str, str]
    chips: dict[str, str]


@lru_cache(maxsize=1)
def matrix() -> Matrix:
    """The matrix that comes with this version."""
    return Matrix.model_validate(packaged("matrix.yaml"))


def packaged(name: str) -> Any:
    """A YAML file of this package, every scalar as it is written: 2.10 is a version, not a number."""
    text = files("isotrain.doctor").joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=yaml.BaseLoader)


def is_exact(wanted: str) -> bool:
    """Whether a stack names one version of a package, not a range."""
    return wanted[0].isdigit()


def specifier(wanted: str) -> SpecifierSet:
    """A version alone means exactly that one."""
    try:
        return SpecifierSet(wanted, prereleases=True)
    except InvalidSpecifier:
        return SpecifierSet(f"=={Version(wanted)}", prereleases=True)


def fits(version: str, wanted: str) -> bool:
    """Whether a package's version is as wanted; builds of one version (`2.10.0+cpu`) are the same."""
    return specifier(wanted).contains(version)
