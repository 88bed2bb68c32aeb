"""A model that is asked: a reference policy, a reward model, or what a training engine updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from isotrain.data.packing import PackedBatch
from isotrain.engine.world import World
from isotrain.models.packed import Backbone

Result = TypeVar("Result")


class InferenceModel:
    def __init__(self, model: Backbone, world: World) -> None:
        self.model = model
        self.world = world
        # As they are sharded now: while sharded weights are whole, the modules show others.
        self.parameters = dict(model.named_parameters())
        self.on_host: dict[int, torch.UntypedStorage] | None = None
        """Host copies while the model is offloaded, by `id` of the tensor whose memory they are."""

    def forward(self, batch: PackedBatch, objective: Callable[[Any], Result]) -> Result:
        """The objective applied to the model's head (`TokenHead` or `ScalarHead`) over one micro-batch."""
        assert self.on_host is None, "the model is offloaded"
        on_device = batch.to(self.world.device)
        result: Result = self.model(
            on_device.tokens_T,
            on_device.positions_T,
            on_device.lengths,
            on_device.predict_N,
            on_device.targets_N,
            objective,
            on_device.continues,
            # By name: traces of a run are digests of the others, and this repeats one of them.
            predict_on_host_N=on_device.predict_on_host_N,
        )
        return result

    @torch.no_grad()
    def infer(self, batches: Sequence[PackedBatch], objective: Callable[[Any], Result]) -> list[Result]:
        """The objective's results, without gradients or dropout; ranks must bring equally many batches."""
        self.model.eval()
        results = [self.forward(batch, objective) for batch in batches]
        self.reshard()
        return results

    def reshard(self) -> None:
        """Let go of weights that were made whole and that no backward pass is waiting for."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
