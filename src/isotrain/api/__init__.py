"""The Python interface: the commands as functions. Nothing here imports torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotrain.engine.checkpoint.layout import MARKER, step_directory, steps_in
from isotrain.errors import DataError, RecipeError
from isotrain.observe.metrics import read_metrics
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe import library
from isotrain.recipe.document import read_source, to_yaml
from isotrain.recipe.load import (
    check_values,
    load_resolved,
    parse_recipe,
    path_override,
    resolved,
)
from isotrain.recipe.schema import Recipe

# numpy and the doctor's tables come in only where they are needed: every command reads this file.
if TYPE_CHECKING:
    from isotrain.tools.doctor.examine import Report
    from isotrain.tools.doctor.system import System
    from isotrain.tools.parity.verdict import Verdict

__all__ = ["Recipe", "Report", "Run", "Verdict", "compare", "doctor", "load_recipe", "read_recipe", "train"]


@dataclass(frozen=True)
class Metrics:
    """A table with a row for each step; not every metric is there at every step."""

    rows: list[dict[str, float]]

    def __repr__(self) -> str:
        """Short, for notebooks: the rows of a run fill pages."""
        if not self.rows:
            return "Metrics(no steps)"
        steps = f"steps {self.rows[0]['step']:g} to {self.rows[-1]['step']:g}"
        return f"Metrics({steps}, {len(self.names)} names such as {', '.join(self.names[1:4])})"

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
        if not RunDirectory(self.path).resolved.is_file():  # before torch comes in
            raise DataError(
                f"{self.path} is not a run directory: give the `output` of a recipe that was trained"
            )
        from isotrain.engine.export import export_run

        return export_run(self.path, Path(out), step, adapter_only)


RecipeLike = Recipe | str | os.PathLike[str] | Mapping[str, Any]
"""A recipe, the name of a shipped one, a file, or the same as a dict."""
RunLike = Run | str | os.PathLike[str]


def load_recipe(recipe: RecipeLike, *overrides: str) -> Recipe:
    """The checked recipe, with overrides such as `"optimizer.lr=1e-4"`."""
    return read_recipe(recipe, overrides)[0]


def read_recipe(recipe: RecipeLike, overrides: Sequence[str] = ()) -> tuple[Recipe, str]:
    """The same, with its text as written; a dict is shown as YAML."""
    if isinstance(recipe, (str, os.PathLike)):
        path = library.locate(os.fspath(recipe))
        source = read_source(path)
        return parse_recipe(source, str(path), overrides), source
    values = resolved(recipe) if isinstance(recipe, Recipe) else _plain(recipe)
    return check_values(values, "the recipe", overrides), to_yaml(values)


def train(
    recipe: RecipeLike, *overrides: str, reward: Callable[..., Any] | None = None, in_process: bool = False
) -> Run:
    """Train a recipe; call it again to resume an interrupted run.

    `reward` is a function for `reward.function` in place of a file. Training runs in a child process, so that
    this one keeps its environment, threads, random state and memory; `in_process` is for programs that do
    nothing else, such as the command line.
    """
    from isotrain.api.child import train_here, train_in_child

    if reward is not None:
        from isotrain.api.functions import function_path

        # Only to know the run directory: a recipe may do without a reward of its own.
        output = load_recipe(recipe, *overrides, "reward.function.path=any.py:any").output
        chosen = path_override("reward.function.path", function_path(reward, Path(output)))
        overrides = (*overrides, chosen)
    checked, source = read_recipe(recipe, overrides)
    (train_here if in_process else train_in_child)(checked, source)
    return Run(checked.output)


def compare(
    a: RunLike,
    b: RunLike,
    *,
    metrics: Sequence[str] = (),
    margins: Mapping[str, float] | None = None,
    allow: Sequence[str] = (),
    reruns: Sequence[RunLike] = (),
    pairs: Sequence[tuple[RunLike, RunLike]] = (),
    dumps: tuple[RunLike, RunLike] | None = None,
    free: bool = False,
    items: int | None = None,
) -> Verdict:
    """Whether `b` ends up like the reference `a`, and computes the same; see `isotrain parity compare`."""
    from isotrain.tools.parity.protocol import Companions, verdict_on

    companions = Companions(
        tuple(_path(run) for run in reruns),
        tuple((_path(reference), _path(candidate)) for reference, candidate in pairs),
        None if dumps is None else (_path(dumps[0]), _path(dumps[1])),
    )
    return verdict_on(
        _path(a),
        _path(b),
        companions,
        metrics=metrics,
        margins=[f"{metric}={value!r}" for metric, value in (margins or {}).items()],
        allow=allow,
        free_running=free,
        items=items,
    )


def doctor(
    device: str | None = None, recipe: RecipeLike | None = None, *, system: System | None = None
) -> Report:
    """Report what is incompatible on this machine, for a device or for a recipe.

    `system` is another machine, such as one that `isotrain doctor --save` recorded.
    """
    from isotrain.tools.doctor.examine import examine
    from isotrain.tools.doctor.matrix import TARGETS
    from isotrain.tools.doctor.system import ThisMachine

    if device is not None and device not in TARGETS:
        raise RecipeError(f"device {device!r} is unknown: use one of {', '.join(TARGETS)}")
    checked = None if recipe is None else load_recipe(recipe)
    if device is None and checked is not None and checked.device.type in TARGETS:
        device = checked.device.type
    return examine(system or ThisMachine(), device, checked)


def _path(run: RunLike) -> Path:
    return run.path if isinstance(run, Run) else Path(run)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """A dict as a file would have it: paths are text, tuples are lists."""

    def text(value: object) -> str:
        if isinstance(value, os.PathLike):
            return str(os.fspath(value))
        hint = "; pass a reward function as train(recipe, reward=function)" if callable(value) else ""
        raise RecipeError(f"the recipe contains {value!r}, which YAML cannot hold{hint}")

    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(values), default=text, allow_nan=False))
    except (TypeError, ValueError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"the recipe cannot be written as a file: {error}") from None
    return plain


def __getattr__(name: str) -> Any:
    modules = {"Verdict": "isotrain.tools.parity.verdict", "Report": "isotrain.tools.doctor.examine"}
    if name not in modules:
        raise AttributeError(f"module 'isotrain.api' has no attribute {name!r}")
    return getattr(import_module(modules[name]), name)
