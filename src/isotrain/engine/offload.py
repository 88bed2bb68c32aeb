"""Offload a model from its device to host memory, and onload it again."""

from __future__ import annotations

import torch

from isotrain.engine.engine import TrainingEngine
from isotrain.engine.inference_model import InferenceModel
from isotrain.models.weights import Shard, shard_of


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
    engine.on_host = {}
    for key, storage in storages.items():
        engine.on_host[key] = storage.cpu()
    for storage in storages.values():
        storage.resize_(0)
    # Another process cannot use memory that the allocator caches.
    torch.get_device_module(engine.world.device).empty_cache()


@torch.no_grad()
def onload(engine: InferenceModel) -> None:
    """Bring everything back, bit for bit; no effect if nothing is offloaded."""
    if engine.on_host is None:
        return
    for key, storage in _storages(engine).items():
        copy = engine.on_host[key]
        storage.resize_(copy.nbytes())
        storage.copy_(copy)
    engine.on_host = None


def held_shard(engine: InferenceModel, tensor: torch.Tensor) -> Shard:
    """This rank's part of a weight or of the optimizer's state, wherever it is now.

    The host copy of an offloaded one is never written to: who keeps it keeps these numbers.
    """
    shard = shard_of(tensor.detach())
    if engine.on_host is None or id(tensor) not in engine.on_host:
        return shard
    part, copy = shard.local, torch.empty(0, dtype=shard.local.dtype)
    copy.set_(engine.on_host[id(tensor)], part.storage_offset(), part.shape, part.stride())
    return Shard(copy, shard.shape, shard.offset)


def _storages(engine: InferenceModel) -> dict[int, torch.UntypedStorage]:
    """Of this rank's parts of all weights and of the optimizer's state, as far as they are on the device."""
    tensors: list[torch.Tensor] = list(engine.parameters.values())
    if isinstance(engine, TrainingEngine):
        for state in engine.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    parts = {id(tensor): shard_of(tensor.detach()).local for tensor in tensors}
    return {key: part.untyped_storage() for key, part in parts.items() if part.device.type != "cpu"}
