"""isotrain as one side of a benchmark: the whole program on a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench
from smollm2 import smollm2
from trl_side import optimizer
from turns import Turns

from isotrain.observe.console import Console
from isotrain.recipe.online import OnlineSection
from isotrain.recipe.schema import Recipe
from isotrain.trainers import launch
from isotrain.trainers.job import Recorder

Metrics = Callable[[Mapping[str, float]], dict[str, float]]


BUDGET = 4096
"""Tokens of a micro-batch."""


def supervised_recipe(
    directory: Path, rows: Path, algorithm: dict[str, Any], lr: float, **data: Any
) -> Recipe:
    """One epoch of SmolLM2 over rows in order, with TRL's defaults: bfloat16 and gradient checkpointing."""
    return Recipe.model_validate(
        {
            "name": "versus-trl",
            "output": str(directory / "run"),
            "model": {"path": str(smollm2()), "dtype": bench.DTYPE, "gradient_checkpointing": True},
            "data": {"train": str(rows), "tokens_per_micro_batch": BUDGET, "shuffle": False, **data},
            "algorithm": algorithm,
            "optimizer": optimizer(lr),
            "trainer": {"epochs": 1},
            "observe": {"loggers": []},
        }
    )


def train_in_turns(recipe: Recipe, steps: int, metrics: Metrics) -> None:
    """Train with `metrics` of each step for the parent, until the parent ends the process."""
    source = recipe.model_dump_json()
    if isinstance(recipe.algorithm, OnlineSection):
        from isotrain.trainers.online import run

        with patch.object(run, "Recorder", recorder_in_turns(steps, metrics)):
            run.train_online(recipe, source)
    else:
        with patch.object(launch, "Recorder", recorder_in_turns(steps, metrics)):
            launch.train_supervised(recipe, source)


def recorder_in_turns(steps: int, metrics: Metrics) -> type[Recorder]:
    class RecorderInTurns(Recorder):
        """Writes metrics as always, then lets the other side work."""

        def __init__(self, console: Console) -> None:
            super().__init__(console)
            self.turns = Turns(steps)

        def write(self, step: int, values: Mapping[str, float]) -> None:
            super().write(step, values)
            self.turns.after_step(**metrics(values))

    return RecorderInTurns
