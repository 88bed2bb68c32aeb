"""Offload a model from its device to host memory, and onload it again."""

from __future__ import annotations

from dataclasses import replace

import torch

from isotrain.engine.engine import InferenceModel, TrainingEngine
from isotrain.models.weights import Shard, shard_of


@torch.no_grad()
def offload(engine: InferenceModel, *, keep_weights: bool = False) -> None:
    """Move weights and optimizer state to host memory; the model cannot run until `onload`.

    With `keep_weights` they alone stay on the device, to be sent from there, until the next `offload`.

    Storages are emptied and the tensors stay: the optimizer and sharding go on holding the same ones.
    Without effect where the device is the host, and on what was moved already.
    """
    if engine.world.device.type == "cpu":
        return
    engine.reshard()
    moved = engine.on_host = engine.on_host or {}
    weights = {id(parameter) for parameter in engine.parameters.values()} if keep_weights else set()
    storages = {
        key: storage for key, storage in _storages(engine).items() if key not in moved and key not in weights
    }
    for key, storage in storages.items():
        moved[key] = storage.cpu()
    for storage in storages.values():
        storage.resize_(0)
    # Another process cannot use memory that the allocator caches.
    torch.get_device_module(engine.world.device).empty_cache()


@torch.no_grad()
def onload(engine: InferenceModel, *, weights_only: bool = False) -> None:
    """Bring everything back, bit for bit; no effect if nothing is offloaded.

    With `weights_only` the model still cannot run: its weights can be sent from the device.
    """
    if engine.on_host is None:
        return
    weights = {id(parameter) for parameter in engine.parameters.values()}
    for key, storage in _storages(engine).items():
        if key in engine.on_host and (key in weights or not weights_only):
            copy = engine.on_host.pop(key)
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
    if not weights_only:
        engine.on_host = None


def has_weights(engine: InferenceModel) -> bool:
    """Whether the device holds the weights, if nothing else."""
    moved = engine.on_host or {}
    return not any(id(parameter) in moved for parameter in engine.parameters.values())


def held_shard(engine: InferenceModel, tensor: torch.Tensor) -> Shard:
    """This rank's part of a weight or of the optimizer's state, wherever it is now.

    The host copy of an offloaded one is never written to: who keeps it keeps these numbers.
    """
    shard = shard_of(tensor.detach())
    if engine.on_host is None:
        return shard
    if id(tensor) not in engine.on_host:
        # What is always on the host changes with the next update.
        return replace(shard, local=shard.local.clone()) if shard.local.device.type == "cpu" else shard
    part, copy = shard.local, torch.empty(0, dtype=shard.local.dtype)
    copy.set_(engine.on_host[id(tensor)], part.storage_offset(), part.shape, part.stride())
    return Shard(copy, shard.shape, shard.offset)


def _storages(engine: InferenceModel) -> dict[int, torch.UntypedStorage]:
    """Memory of this rank's weights and optimizer state on the device, by `id` of the tensor."""
    tensors: list[torch.Tensor] = list(engine.parameters.values())
    if isinstance(engine, TrainingEngine):
        for state in engine.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    parts = {id(tensor): shard_of(tensor.detach()).local for tensor in tensors}
    return {key: part.untyped_storage() for key, part in parts.items() if part.device.type != "cpu"}
