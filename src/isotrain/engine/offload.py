"""Offload a model from its device to host memory, and onload it again."""

from __future__ import annotations

import torch

from isotrain.engine.engine import TrainingEngine
from isotrain.engine.inference_model import InferenceModel
from isotrain.models.weights import shard_of


@torch.no_grad()
def offload(engine: InferenceModel) -> None:
    """Move weights and optimizer state to host memory; the model cannot run until `onload`.

    Storages are emptied and the tensors stay: the optimizer and sharding go on holding the same ones.
    Without effect where the device is the host, or where this was done already.
    """
    if engine.world.device.type == "cpu" or engine.on_host is not None:
        return
    engine.reshard()
    storages = _storages(engine)
    engine.on_host = [storage.cpu() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    # Another process cannot use memory that the allocator caches.
    torch.get_device_module(engine.world.device).empty_cache()


@torch.no_grad()
def onload(engine: InferenceModel) -> None:
    """Bring everything back, bit for bit; no effect if nothing is offloaded."""
    if engine.on_host is None:
        return
    for storage, copy in zip(_storages(engine), engine.on_host, strict=True):
        storage.resize_(copy.nbytes())
        storage.copy_(copy)
    engine.on_host = None


def _storages(engine: InferenceModel) -> list[torch.UntypedStorage]:
    """Of this rank's parts of all weights and of the optimizer's state, as far as they are on the device."""
    tensors: list[torch.Tensor] = list(engine.parameters.values())
    if isinstance(engine, TrainingEngine):
        for state in engine.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    parts = [shard_of(tensor.detach()).local for tensor in tensors]
    return [part.untyped_storage() for part in parts if part.device.type != "cpu"]
