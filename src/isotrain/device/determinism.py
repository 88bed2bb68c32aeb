"""From a recipe's level of determinism to variables and switches, with warnings for what cannot be set."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from isotrain.device.base import Device

_HASHES = "PYTHONHASHSEED"


@dataclass(frozen=True)
class Profile:
    level: str
    variables: dict[str, str]
    """Variables that a process must have in its environment before its first operator."""
    complaints: tuple[str, ...]
    """Settings that could not be made, each with a remedy."""

    def as_json(self) -> dict[str, Any]:
        return {"level": self.level, "variables": self.variables, "not_set": list(self.complaints)}


def profile(device: Device, level: str, environment: Mapping[str, str], *, starts: bool = False) -> Profile:
    """Settings of `level` for a process with this environment; `starts` says that it is yet to start.

    A variable that the user has set otherwise stays as it is.
    """
    if level == "off":
        return Profile(level, {}, ())
    repeatable = {_HASHES: "0", **device.deterministic_variables(environment)}
    complaints = [
        f"{name} stays {environment[name]!r} as you set it; {value!r} would make results repeatable"
        for name, value in repeatable.items()
        if environment.get(name, value) != value and name != _HASHES
    ]
    # Python has read it when it started; any fixed number will do.
    fixed = environment.get(_HASHES, "").isdecimal()
    if not fixed and (_HASHES in environment or (not starts and sys.flags.hash_randomization)):
        del repeatable[_HASHES]
        complaints.append(f"{_HASHES} is not a fixed number; export {_HASHES}=0 before the start")
    variables = {name: environment.get(name, value) for name, value in repeatable.items()}
    return Profile(level, variables, tuple(complaints))


def make_deterministic(level: str) -> None:
    """torch's own switch: operators without a repeatable kernel warn, or with `strict` end the run."""
    if level == "off":
        return
    torch.use_deterministic_algorithms(True, warn_only=level != "strict")
    # It would fill every new tensor, to make mistakes repeatable that we do not make.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
