"""A model for inference only: a reference policy or a reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from isotrain.data.packing import PackedBatch
from isotrain.engine.forward import Forward, Result
from isotrain.engine.world import World
from isotrain.models.packed import PackedModel
from isotrain.models.scalar import ScalarModel


class InferenceModel:
    def __init__(self, model: PackedModel | ScalarModel, world: World) -> None:
        self.model = model
        self.world = world
        self.forward = Forward(model, world)

    def infer(self, batches: Sequence[PackedBatch], objective: Callable[[Any], Result]) -> list[Result]:
        """The objective applied to each micro-batch's head, without gradients."""
        return self.forward.infer(batches, objective)
