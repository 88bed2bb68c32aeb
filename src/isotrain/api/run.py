"""The results of a training in its run directory: metrics and checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from isotrain.engine.checkpoint.layout import MARKER, step_directory, steps_in
from isotrain.errors import DataError
from isotrain.observe.metrics import read_metrics
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.load import load_resolved
from isotrain.recipe.schema import Recipe


@dataclass(frozen=True)
class Metrics:
    """A table with a row for each step; not every metric is there at every step."""

    rows: list[dict[str, float]]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> list[float]:
        """A whole column, NaN where a step has no such metric."""
        self.curve(name)
        return [row.get(name, math.nan) for row in self.rows]

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """The steps that have a metric, and its values there: `plt.plot(*run.metrics.curve("val/loss"))`."""
        rows = [row for row in self.rows if name in row]
        if not rows:
            near = get_close_matches(name, self.names, n=3) or self.names
            raise DataError(f"there is no metric {name!r}; the run has {', '.join(near)}")
        return [int(row["step"]) for row in rows], [row[name] for row in rows]

    def to_pandas(self) -> Any:
        """A DataFrame with the steps as its index; needs pandas."""
        import pandas

        return pandas.DataFrame(self.rows).set_index("step")


class Run:
    """A run directory; opening one reads nothing yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def recipe(self) -> Recipe:
        """The recipe with all defaults, as it was trained."""
        return load_resolved(RunDirectory(self.path).resolved)

    @property
    def metrics(self) -> Metrics:
        return Metrics(read_metrics(RunDirectory(self.path).metrics))

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The directories of complete checkpoints by their steps, oldest first."""
        root = RunDirectory(self.path).checkpoints
        directories = {step: step_directory(root, step) for step in reversed(steps_in(root))}
        return {step: path for step, path in directories.items() if (path / MARKER).exists()}

    def export(
        self, out: str | os.PathLike[str], step: int | None = None, *, adapter_only: bool = False
    ) -> Path:
        """Write a checkpoint, the newest by default, as a model that transformers and vLLM load."""
        from isotrain.engine.export import export_run  # torch comes in only here

        return export_run(self.path, Path(out), step, adapter_only)
