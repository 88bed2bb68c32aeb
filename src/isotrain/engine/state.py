"""What of an engine a checkpoint holds, and how it is put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from isotrain.device.base import Device
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.engine import TrainingEngine
from isotrain.models.shards import Shard, shard_of

MOMENTS = ("exp_avg", "exp_avg_sq")


def engine_shards(engine: TrainingEngine) -> dict[str, Shard]:
    """This rank's part of every trained weight and its optimizer moments; frozen weights are not saved."""
    start_optimizer_state(engine)
    shards = {}
    for name, parameter in engine.trained.items():
        shards[f"weights/{name}"] = shard_of(parameter)
        for moment in MOMENTS:
            shards[f"{moment}/{name}"] = shard_of(engine.optimizer.state[parameter][moment])
    return shards


def start_optimizer_state(engine: TrainingEngine) -> None:
    """Create AdamW's state as its first step would, so that there is something to save or fill."""
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            if not engine.optimizer.state[parameter]:
                on = parameter.device if group["fused"] else torch.device("cpu")
                engine.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=on),
                    **{moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS},
                }


def optimizer_updates(engine: TrainingEngine) -> int:
    """Updates made so far; all parameters share the count."""
    start_optimizer_state(engine)
    return int(next(iter(engine.optimizer.state.values()))["step"].item())


def generator_shards(device: Device) -> dict[str, Shard]:
    """The state of this rank's torch generators."""
    return {
        f"generator/{name}": Shard(state, tuple(state.shape), (0,))
        for name, state in device.rng_state().items()
    }


def host_generators() -> dict[str, Any]:
    """The state of Python's and NumPy's generators as JSON."""
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": random.getstate(),
        "numpy": [numpy_state["state"]["key"].tolist(), int(numpy_state["state"]["pos"])],
    }


def restore(engine: TrainingEngine, device: Device, reader: CheckpointReader) -> None:
    """Put an engine back to where a checkpoint was taken.

    The generators are put back only on the number of ranks that saved them: on another, no continuation is
    the right one, and dropout goes on from the fresh seeds.
    """
    world = engine.world
    reader.fill(engine_shards(engine), world.rank)
    for state in engine.optimizer.state.values():
        state["step"].fill_(float(reader.state["updates"]))
    if reader.ranks != world.size:
        return
    shards = generator_shards(device)
    reader.fill(shards, world.rank)
    device.set_rng_state({name.removeprefix("generator/"): shard.local for name, shard in shards.items()})
    extras = reader.extras(world.rank)
    version, internal, gauss = extras["python"]
    random.setstate((version, tuple(internal), gauss))
    key, position = extras["numpy"]
    np.random.set_state(
        {"bit_generator": "MT19937", "state": {"key": np.array(key, dtype=np.uint32), "pos": position}}
    )
