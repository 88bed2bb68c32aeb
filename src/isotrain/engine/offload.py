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
    Host copies are made once, in pinned memory: pageable memory allocated anew at each step costs a 70B run
    seconds. Later, what is trained is copied into them, and frozen weights, which never change, not at all.
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
    frozen = _frozen(engine)
    engine.before_reuse()
    for key, storage in storages.items():
        moved[key] = _host_copy(engine, key, storage, is_current=key in frozen)
    accelerator = torch.get_device_module(engine.world.device)
    accelerator.synchronize()  # copies to pinned memory return before they are done
    for storage in storages.values():
        storage.resize_(0)
    # Another process cannot use memory that the allocator caches.
    accelerator.empty_cache()


def _frozen(engine: InferenceModel) -> set[int]:
    """Weights that no update changes, by `id`."""
    trained = engine.trained.values() if isinstance(engine, TrainingEngine) else ()
    return {id(p) for p in engine.parameters.values()} - {id(p) for p in trained}


def _host_copy(
    engine: InferenceModel, key: int, storage: torch.UntypedStorage, *, is_current: bool
) -> torch.UntypedStorage:
    copy = engine.host_copies.get(key)
    if copy is not None and is_current:
        return copy
    if copy is None or copy.nbytes() != storage.nbytes():
        buffer = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        copy = engine.host_copies[key] = buffer.untyped_storage()
    copy.copy_(storage, non_blocking=True)
    return copy


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
            storage.copy_(copy, non_blocking=True)
    # Nobody may write to a host copy, or free it, before it has been read.
    torch.get_device_module(engine.world.device).synchronize()
    if not weights_only:
        engine.on_host = None


def has_weights(engine: InferenceModel) -> bool:
    """Whether the device holds the weights, if nothing else."""
    moved = engine.on_host or {}
    return not any(id(parameter) in moved for parameter in engine.parameters.values())


def held_shard(engine: InferenceModel, tensor: torch.Tensor) -> Shard:
    """This rank's part of a weight or of the optimizer's state, wherever it is now.

    The host copy of an offloaded one keeps these numbers until the `offload` after the next `onload`, which
    calls `engine.before_reuse` first: a second set of copies would take the host as much memory again.
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
