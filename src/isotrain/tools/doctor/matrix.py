"""The support matrix: which versions were published as a working stack; order of versions of any form."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
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


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stack(StrictModel):
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
        for pin in packages.values():
            specifier(pin)
        return packages

    def packages_on(self, machine: str) -> dict[str, str]:
        """All packages on a type of machine, as `uname -m` calls it."""
        return self.packages | (self.arm if machine == "aarch64" else self.x86)


class Matrix(StrictModel):
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
    text = files("isotrain.tools.doctor").joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=yaml.BaseLoader)


def is_exact(pin: str) -> bool:
    """Whether a stack names one version of a package, not a range."""
    return pin[0].isdigit()


def specifier(pin: str) -> SpecifierSet:
    """A version alone means exactly that one."""
    try:
        return SpecifierSet(pin, prereleases=True)
    except InvalidSpecifier:
        return SpecifierSet(f"=={Version(pin)}", prereleases=True)


def fits(version: str, pin: str) -> bool:
    """Whether a package's version is as wanted; builds of one version (`2.10.0+cpu`) are the same."""
    return specifier(pin).contains(version)


# An end sorts after `8.1.RC1.alpha001` and before `25.3.rc1.2`: what is not final lies below, patches above.
_END = (3, 0)
_STAGES = {"alpha": 0, "a": 0, "t": 0, "beta": 1, "rc": 2}
_NUMBER = 4

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}

Key = tuple[tuple[int, int], ...]


def order(version: str) -> Key:
    """A key to sort by: `8.1.RC1.alpha001` < `8.1.RC1` < `8.1.0`, `9.1.0-beta.1` < `9.1.0`.

    Numbers of builds, as in `24.1.rc1.b030`, do not count.
    """
    key = []
    for stage, number in re.findall(r"([a-z]*)\.?([0-9]{1,9})", version.lower()):
        if stage != "b":
            key.append((_STAGES.get(stage, _NUMBER), int(number)))
    return (*key, _END)


def final(version: str) -> str:
    """The release that a preview of it leads to: `8.1.RC1` for `8.1.RC1.alpha001`."""
    return re.sub(r"[.-](alpha|beta).*", "", version, flags=re.IGNORECASE)


def satisfies(version: str, condition: str) -> bool:
    """Whether a version is as `condition` says: `>=8.3.RC1,<9`, or a version alone for that one."""
    return all(_holds(version, part.strip()) for part in condition.split(","))


def _holds(version: str, part: str) -> bool:
    match = re.match(r"(>=|<=|==|!=|>|<)?\s*(.+)", part)
    assert match, f"not a condition on a version: {part!r}"
    return _COMPARISONS[match[1] or "=="](order(version), order(match[2]))
