"""Curves whose truth is known, as runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from isotrain.tools.parity.run import Numbers, RunLog, Series


def falling(steps: int = 80, seed: int = 0) -> Numbers:
    """A loss that falls from 5 to 1, with steps that are easy or hard."""
    draw = np.random.default_rng(seed)
    curve: Numbers = 1 + 4 * np.exp(-np.arange(steps) / 20) + 0.05 * draw.normal(size=steps)
    return curve


def run_of(name: str = "run", **curves: Numbers) -> RunLog:
    """`loss=` becomes `train/loss`; all from step 1 on."""
    metrics = {
        f"train/{metric}": Series(np.arange(1, len(values) + 1), np.asarray(values, np.float64))
        for metric, values in curves.items()
    }
    return RunLog(Path(name), "test", metrics)


def noisy(curve: Numbers, size: float, seed: int) -> Numbers:
    """Rounding noise that grows as runs drift apart."""
    draw = np.random.default_rng(seed)
    growth = np.linspace(0.2, 1, len(curve))
    return curve + size * growth * draw.normal(size=len(curve))
