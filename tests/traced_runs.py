"""Levels of runs that are given by their directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isotrain.tools.parity.levels import layers
from isotrain.tools.parity.levels.level import Level
from isotrain.tools.parity.read.runs import is_isotrain_run, read_isotrain_run
from isotrain.tools.parity.run import RunLog


def layers_level(reference: Path, candidate: Path, noise: Sequence[Path] = (), *, dtype: str) -> Level:
    return layers.layers_level(_run(reference), _run(candidate), noise, dtype=dtype)


def _run(path: Path) -> RunLog:
    """Traces may be there without a run around them."""
    return read_isotrain_run(path) if is_isotrain_run(path) else RunLog(path, "traces", {})
