"""One run to compare, as its log tells: its curves, and what is known of where they come from.

S: steps that a metric was recorded at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isotrain.language import tr

Numbers = npt.NDArray[np.float64]
BASELINE = "isotrain baseline"
"""The format of several reruns in one file."""
ROLES = {"reference": tr("reference"), "candidate": tr("candidate")}


@dataclass(frozen=True)
class Series:
    """One metric over rising steps; a step has one value."""

    steps_S: npt.NDArray[np.int64]
    values_S: Numbers

    def __len__(self) -> int:
        return len(self.steps_S)


@dataclass(frozen=True)
class RunLog:
    path: Path
    format: str
    """How it was written, for people: `isotrain run`, `verl console log`, ..."""
    metrics: Mapping[str, Series]
    recipe: dict[str, Any] | None = None
    """All fields, where the source has them."""
    settings: dict[str, Any] | None = None
    """The recipe that a log's printed configuration comes to, where another trainer wrote it."""
    environment: dict[str, Any] | None = None
    """Device, versions and variables of its last start."""
    planned_steps: int | None = None
    """Steps that it was to train for, where the source says so."""
    data: dict[str, str] = field(default_factory=dict)
    """Digests of the data that it was trained on."""
    sha256: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every file that was read, by name."""
    notes: tuple[str, ...] = ()
    """Notes on the log for readers of the comparison, such as where it was resumed."""

    @property
    def configuration(self) -> dict[str, Any] | None:
        """Fields of a recipe that tell what was trained; None where nothing tells."""
        return self.recipe if self.recipe is not None else self.settings


def section(content: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """A part of a recipe or an environment; empty where a stranger's file has no such part."""
    part = (content or {}).get(name)
    return part if isinstance(part, dict) else {}


def common(series: Sequence[Series]) -> tuple[npt.NDArray[np.int64], list[Numbers]]:
    """The steps that all have, with each one's values there."""
    steps_S = series[0].steps_S
    for curve in series[1:]:
        steps_S = np.intersect1d(steps_S, curve.steps_S, assume_unique=True)
    return steps_S, [curve.values_S[np.searchsorted(curve.steps_S, steps_S)] for curve in series]
