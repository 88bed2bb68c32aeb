"""isotrain's online loop as one side of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from turns import Turns

from isotrain.observe.progress import Progress
from isotrain.recipe.schema import Recipe
from isotrain.trainers.online import run
from isotrain.trainers.recorder import Recorder

Figures = Callable[[Mapping[str, float]], dict[str, float]]


def train_in_turns(recipe: Recipe, steps: int, figures: Figures) -> None:
    """The whole program, with `figures` of each step for the parent, until the parent ends it."""

    class RecorderInTurns(Recorder):
        """Writes metrics as always, then lets the other side work."""

        def __init__(self, progress: Progress) -> None:
            super().__init__(progress)
            self.turns = Turns(steps)  # all models are loaded now

        def write(self, step: int, values: Mapping[str, float]) -> None:
            super().write(step, values)
            self.turns.after_step(**figures(values))

    run.Recorder = RecorderInTurns  # type: ignore[misc]
    run.train_online(recipe, recipe.model_dump_json())
