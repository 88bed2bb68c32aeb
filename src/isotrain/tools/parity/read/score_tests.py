"""Records of a run's score tests about its model's constants, checked before anything is believed."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from isotrain.errors import DataError
from isotrain.tools.parity.certify.certificate import printable, problems_of
from isotrain.tools.parity.read.bounded import Source, inside

DIRECTORY = "score_tests"
FORMAT = 1

_FILE = re.compile(r"step-([0-9]{6})-rank-([0-9]{5})\.json")
_MAX_BYTES, _MAX_FILES, _MAX_MODULES = 16 << 20, 10_000, 20_000

Name = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(printable)]
Kind = Literal["norm", "attention", "rotary"]
Constant = Literal["scale", "epsilon", "base", "gain", "bias"]
Number = Annotated[float, Field(gt=-1e300, lt=1e300)]
Size = Annotated[float, Field(ge=0, lt=1e300)]


class _ScoreTestPart(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class Estimate(_ScoreTestPart):
    """Estimated error of one constant of a module."""

    constant: Constant
    stated: Number | None
    """By the model's config."""
    off: Number
    """A share of the constant; of a bias, a share of the output's size."""
    error: Size | None
    effect: Size
    """By which share of its norm the output changes per unit of `off`."""
    confused: Annotated[list[Constant], Field(max_length=5)] = []
    """Constants that explain as much as this one does."""


class Module(_ScoreTestPart):
    module: Name
    kind: Kind
    dtype: Literal["float32", "bfloat16", "float16"]
    clusters: Annotated[int, Field(ge=0, le=1 << 40)]
    rest: Size
    """Norm of what no constant explains, over the norm of the rounding that is expected."""
    constants: Annotated[list[Estimate], Field(max_length=5)]


class _ScoreTestFile(_ScoreTestPart):
    format: int
    step: Annotated[int, Field(ge=0)]
    ranks: Annotated[int, Field(ge=1)]
    model_type: Name
    modules: Annotated[list[Module], Field(max_length=_MAX_MODULES)]
    not_tested: Annotated[dict[Name, Name], Field(max_length=_MAX_MODULES)]


class Record(_ScoreTestPart):
    """One run's first recorded step, over all ranks."""

    modules: dict[str, Module]
    not_tested: dict[str, str]


def read_score_tests(run: Path) -> Record | None:
    """The first step that all ranks recorded; None without any."""
    steps: dict[int, dict[int, str]] = {}
    for name in _names(run):
        if match := _FILE.fullmatch(name):
            steps.setdefault(int(match[1]), {})[int(match[2])] = name
    for step in sorted(steps):
        names = steps[step]
        files = [_read(run, names[rank]) for rank in sorted(names)]
        # Their number first: a file may claim any.
        if sorted(names) == list(range(len(names))) and all(file.ranks == len(files) for file in files):
            return _joined(files)
    return None


def _names(run: Path) -> list[str]:
    directory = run / DIRECTORY
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"{directory} cannot be read ({error.strerror or error})") from error
    if len(names) > _MAX_FILES:
        raise DataError(f"{directory}: more than {_MAX_FILES} files; keep those of the first step")
    return names


def _read(run: Path, name: str) -> _ScoreTestFile:
    source = Source(inside(run, f"{DIRECTORY}/{name}"), f"{DIRECTORY}/{name}")
    try:
        file = _ScoreTestFile.model_validate_json(source.whole(_MAX_BYTES))
    except ValidationError as error:
        raise source.error(f"{problems_of(error)}; record the run again") from error
    if file.format != FORMAT:
        raise source.error("written by another version of isotrain; record both runs with this one")
    names = [module.module for module in file.modules]
    twice = len(set(names)) < len(names) or any(
        len({estimate.constant for estimate in module.constants}) < len(module.constants)
        for module in file.modules
    )
    if twice:
        raise source.error("a module or constant comes twice; record the run again")
    return file


def _joined(files: list[_ScoreTestFile]) -> Record:
    """Ranks look at different samples: their estimates are averaged, the surer ones with more weight."""
    by_name: dict[str, list[Module]] = {}
    for file in files:
        for module in file.modules:
            by_name.setdefault(module.module, []).append(module)
    not_tested = {name: why for file in files for name, why in file.not_tested.items() if name not in by_name}
    return Record(modules={name: _mean(same) for name, same in by_name.items()}, not_tested=not_tested)


def _mean(same: list[Module]) -> Module:
    first = same[0]
    if len(same) == 1:
        return first
    constants = []
    for number, estimate in enumerate(first.constants):
        others = [module.constants[number] for module in same if number < len(module.constants)]
        known = [peer for peer in others if peer.constant == estimate.constant and peer.error]
        if not known:
            constants.append(estimate)
            continue
        weights = [1 / (peer.error or 1.0) ** 2 for peer in known]
        whole = math.fsum(weights)
        off = math.fsum(weight * peer.off for weight, peer in zip(weights, known, strict=True)) / whole
        effect = max(peer.effect for peer in known)
        confused = sorted({name for peer in known for name in peer.confused})
        change = {"off": off, "error": whole**-0.5, "effect": effect, "confused": confused}
        constants.append(estimate.model_copy(update=change))
    change = {
        # Each rank spends one of its clusters on its own mean.
        "clusters": sum(max(0, module.clusters - 1) for module in same) + 1,
        "rest": max(module.rest for module in same),
        "constants": constants,
    }
    return first.model_copy(update=change)
