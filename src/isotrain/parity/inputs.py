"""What went into two runs and differs: recipe or data, each with a name by which it can be allowed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isotrain.language import listed, tr
from isotrain.parity.run import Run
from isotrain.recipe.difference import MAY_DIFFER_IN_PARITY, changes, not_free, version_changes

_FREE_ENVIRONMENT = ("time", "command")
ALLOWED = ("recipe", "data")


@dataclass(frozen=True)
class InputDifference:
    name: str
    message: str


def differences(reference: Run, candidate: Run) -> Iterator[InputDifference]:
    """Everything that makes it another training before a step was computed."""
    yield from _recipes(reference, candidate)
    yield from _data(reference, candidate)


def recipe_changes(reference: Run, candidate: Run) -> list[str]:
    """Fields that make it another training: `optimizer.lr: 1e-05 -> 0.0001`."""
    if reference.recipe is None or candidate.recipe is None:
        return []
    found = version_changes(reference.recipe, candidate.recipe)
    return not_free(found, {*MAY_DIFFER_IN_PARITY, *_same_content(reference, candidate)})


def _same_content(reference: Run, candidate: Run) -> Iterator[str]:
    """Paths that may differ, because what is there has the same digest."""
    for name, digest in reference.data.items():
        if candidate.data.get(name) == digest:
            yield f"data.{name}" if name in ("train", "validation") else f"{name}.path"


def environment_changes(reference: Run, candidate: Run) -> list[str]:
    """Device, versions and variables that differ: what a difference may come from."""
    if reference.environment is None or candidate.environment is None:
        return []
    return not_free(changes(reference.environment, candidate.environment), _FREE_ENVIRONMENT)


def _recipes(reference: Run, candidate: Run) -> Iterator[InputDifference]:
    found = recipe_changes(reference, candidate)
    if found:
        yield InputDifference("recipe", tr("the recipes differ: {changes}", changes=listed(found, "; ")))


def _data(reference: Run, candidate: Run) -> Iterator[InputDifference]:
    differ = [name for name, digest in reference.data.items() if candidate.data.get(name, digest) != digest]
    if differ:
        yield InputDifference(
            "data", tr("they were not trained on the same rows: {names}", names=", ".join(differ))
        )
