"""Why two runs cannot be compared as they are; each is named, so that it can be allowed by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from isotrain.parity.run import Run
from isotrain.recipe.difference import MAY_DIFFER_IN_PARITY, changes, not_free

_FREE_ENVIRONMENT = ("time", "command")
# With these the curves are still curves of something; without common steps there is nothing to compare.
ALLOWED = ("steps", "recipe", "data", "missing")
_SHOWN = 5


@dataclass(frozen=True)
class Obstacle:
    name: str
    message: str


def obstacles(reference: Run, candidate: Run, metrics: list[str]) -> Iterator[Obstacle]:
    """Everything that stands in the way of comparing these metrics."""
    yield from _recipes(reference, candidate)
    yield from _data(reference, candidate)
    for metric in metrics:
        yield from _curves(metric, reference, candidate)


def recipe_changes(reference: Run, candidate: Run) -> list[str]:
    """Fields that make it another training: `optimizer.lr: 1e-05 -> 0.0001`."""
    if reference.recipe is None or candidate.recipe is None:
        return []
    found = changes(reference.recipe, candidate.recipe)
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


def _recipes(reference: Run, candidate: Run) -> Iterator[Obstacle]:
    found = recipe_changes(reference, candidate)
    if found:
        yield Obstacle("recipe", "the recipes differ: " + "; ".join(found))


def _data(reference: Run, candidate: Run) -> Iterator[Obstacle]:
    differ = [name for name, digest in reference.data.items() if candidate.data.get(name, digest) != digest]
    if differ:
        yield Obstacle("data", f"they were not trained on the same rows: {', '.join(differ)}")


def _curves(metric: str, reference: Run, candidate: Run) -> Iterator[Obstacle]:
    a, b = reference.metrics.get(metric), candidate.metrics.get(metric)
    for run, series in ((reference, a), (candidate, b)):
        if series is None:
            yield Obstacle("missing", f"{run.path} has no '{metric}'")
        elif not np.isfinite(series.values_S).all():
            bad = series.steps_S[~np.isfinite(series.values_S)]
            steps = ", ".join(map(str, bad[:_SHOWN])) + (", ..." if len(bad) > _SHOWN else "")
            yield Obstacle("nan", f"'{metric}' of {run.path} is not a number at step {steps}")
    if a is None or b is None:
        return
    only_a, only_b = np.setdiff1d(a.steps_S, b.steps_S), np.setdiff1d(b.steps_S, a.steps_S)
    if len(only_a) or len(only_b):
        yield Obstacle(
            "steps",
            f"'{metric}' was recorded at other steps: {len(a)} of {reference.path}, {len(b)} of "
            f"{candidate.path}, {len(a) - len(only_a)} of both",
        )
    if len(only_a) == len(a):
        yield Obstacle("no-common-steps", f"'{metric}' has no step in both runs")
