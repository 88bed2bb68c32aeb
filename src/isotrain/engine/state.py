"""The state of an engine in a checkpoint, saved and restored."""

from __future__ import annotations

import random
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import torch

from isotrain.device.base import Device
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.engine import LossScale, TrainingEngine
from isotrain.engine.offload import held_shard
from isotrain.engine.optimizer import MOMENTS, empty_moment
from isotrain.engine.world import World
from isotrain.errors import CheckpointError
from isotrain.models.weights import Shard


def engine_shards(engine: TrainingEngine, prefix: str = "") -> dict[str, Shard]:
    """This rank's part of every trained weight and its optimizer moments; frozen weights are not saved.

    Those of an offloaded model are its host copies: nothing returns to the device. Engines that share a
    checkpoint have prefixes of their own, such as `critic/`.
    """
    if engine.on_host is None:
        start_optimizer_state(engine)
    groups = engine.optimizer.param_groups
    moments = {p: group.get("moments", MOMENTS) for group in groups for p in group["params"]}
    shards = {}
    for name, parameter in engine.trained.items():
        weight, state = held_shard(engine, parameter), engine.optimizer.state.get(parameter)
        shards[f"{prefix}weights/{name}"] = weight
        for moment in moments[parameter]:
            # An offloaded model that was never updated has none, and the device no room for it now.
            shards[f"{prefix}{moment}/{name}"] = (
                held_shard(engine, state[moment])
                if state
                else replace(weight, local=torch.zeros_like(weight.local))
            )
    return shards


def saved_shards(engine: TrainingEngine, prefix: str = "") -> dict[str, Shard]:
    """This rank's part of a checkpoint: of several copies of the weights, the first is saved."""
    world = engine.world
    return engine_shards(engine, prefix) if world.rank == world.first_copy_rank else {}


def start_optimizer_state(engine: TrainingEngine) -> None:
    """Create the optimizer's state as its first step would, so that there is something to save or fill."""
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            if not engine.optimizer.state[parameter]:
                on = parameter.device if group["fused"] else torch.device("cpu")
                engine.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=on),
                    **{
                        moment: empty_moment(engine.optimizer, parameter)
                        for moment in group.get("moments", MOMENTS)
                    },
                }


def saved_counts(engine: TrainingEngine, prefix: str = "") -> dict[str, float]:
    """The engine's counts in a checkpoint, the same on every rank."""
    scale = engine.loss_scale
    scales = {} if scale is None else {f"{prefix}loss_scale/{n}": v for n, v in asdict(scale).items()}
    return {f"{prefix}updates": optimizer_updates(engine), **scales}


def optimizer_updates(engine: TrainingEngine) -> int:
    """Updates made so far; all parameters share the count."""
    states = engine.optimizer.state.values()
    return int(held_shard(engine, next(iter(states))["step"]).local.item()) if states else 0


def generator_shards(device: Device) -> dict[str, Shard]:
    """The state of this rank's torch generators, which means nothing to another kind of device."""
    return {
        f"generator/{device.type}/{name}": Shard(state, tuple(state.shape), (0,))
        for name, state in device.rng_state().items()
    }


def host_generators() -> dict[str, Any]:
    """The state of Python's and NumPy's generators as JSON."""
    numpy_state: Any = np.random.get_state()
    _, key, *position_and_gauss = numpy_state
    return {"python": random.getstate(), "numpy": [key.tolist(), *position_and_gauss]}


def restore(engine: TrainingEngine, device: Device, reader: CheckpointReader, prefix: str = "") -> None:
    """Put an engine back to where a checkpoint was taken, and with it the generators of its rank.

    `prefix` is the one it was saved with; the checkpoint counts its updates as `<prefix>updates`.
    """
    assert engine.on_host is None, "the model is offloaded"
    reader.fill(engine_shards(engine, prefix), engine.world.first_copy_rank)
    for state in engine.optimizer.state.values():
        state["step"].fill_(float(reader.state[f"{prefix}updates"]))
    if engine.loss_scale is not None:
        value, finite, skipped = (
            reader.state[f"{prefix}loss_scale/{field.name}"] for field in fields(LossScale)
        )
        engine.loss_scale = LossScale(float(value), int(finite), int(skipped))
    _restore_generators(device, engine.world, reader)


def _restore_generators(device: Device, world: World, reader: CheckpointReader) -> None:
    """Only on the kind of device and the number of ranks that saved them.

    On others no continuation is the right one, and dropout goes on from the fresh seeds.
    """
    generators = generator_shards(device)
    if reader.ranks != world.size or not generators.keys() <= reader.shapes().keys():
        return
    reader.fill(generators, world.rank)
    try:
        device.set_rng_state({name.split("/")[-1]: shard.local for name, shard in generators.items()})
        _set_host_generators(reader.extras(world.rank))
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            f"{reader.directory}: the generators of rank {world.rank} do not fit ({error})"
        ) from error


def _set_host_generators(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key, position, has_gauss, cached = state["numpy"]
    # NumPy does not check the position, and would read beyond the key.
    if len(key) != 624 or not 0 <= position <= 624:
        raise ValueError(f"NumPy's generator is at word {position} of {len(key)}")
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, cached))
