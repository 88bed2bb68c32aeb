"""Training what has fewer rows than ranks: `python few_rows_ranks.py DEVICE MODELS OUT [FROM]`.

The first rank has all tokens: sums over ranks, and with them all numbers, are then those of one rank.
FROM has checkpoints to go on from.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from jobs import SAMPLES, critic_objective, numbers, policy_objective, result_file, updates
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from isotrain.data.packing import pack
from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_critic, build_engine
from isotrain.engine.checkpoint.reader import newest_valid
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.state import engine_shards, host_generators, optimizer_updates, restore
from isotrain.engine.world import World, join_world
from isotrain.recipe.schema import ModelSection, OptimizerSection
from isotrain.weights.send import full_weights

STEPS = 2
# The norm is summed in another order on each number of ranks: gradients are not clipped.
OPTIMIZER = OptimizerSection(max_grad_norm=0, state_dtype="bfloat16")


def engines(models: Path, device: Device, world: World) -> dict[str, TrainingEngine]:
    def section(name: str, **options: object) -> ModelSection:
        given = {"path": str(models / name / "model"), "dtype": "float32", "logits_chunk": 16}
        return ModelSection.model_validate({**given, "fused": "off", **options})

    # A CPU has no other memory to keep them in: there it changes nothing.
    adapted = section("tiny", lora={"rank": 1}, offload={"weights": True})
    return {
        "mixture": build_engine(section("mixture"), OPTIMIZER, device=device, world=world, seed=0),
        "adapters": build_engine(adapted, OPTIMIZER, device=device, world=world, seed=0),
        "critic": build_critic(section("tiny"), OPTIMIZER, path=None, device=device, world=world),
    }


def save(engine: TrainingEngine, world: World, root: Path) -> None:
    writer = CheckpointWriter(root, world.rank, world.size, keep=1)
    world.barrier()  # the first rank's writer clears the place before anyone writes
    updates_made = optimizer_updates(engine)
    writer.save(updates_made, engine_shards(engine), host_generators(), {"updates": updates_made})
    writer.wait()
    assert writer.failure() is None


def main(device_type: str, models: Path, out: Path, source: Path | None) -> None:
    device, found = choose_device(device_type), dict[str, torch.Tensor]()
    with join_world(device) as world:
        batches = [pack(SAMPLES if world.is_main else [])]
        for name, engine in engines(models, device, world).items():
            if source is not None:
                reader, complaints = newest_valid(source / name, world)
                assert reader is not None and not complaints
                restore(engine, device, reader)
            objective = critic_objective if name == "critic" else policy_objective
            found[f"{name}/numbers"] = numbers(updates(engine, objective, batches, STEPS))
            save(engine, world, out / name)
            weights = {} if name == "adapters" else dict(full_weights(engine, torch.float32))
            found |= {f"{name}/{key}": tensor.cpu() for key, tensor in weights.items()}
            for key, parameter in engine.trained.items():
                split = parameter.placements[-1].dim if isinstance(parameter, DTensor) else 0
                found[f"{name}/dimension/{key}"] = torch.tensor(split)
        out.mkdir(parents=True, exist_ok=True)
        save_file({name: t.contiguous().clone() for name, t in found.items()}, result_file(out, world.rank))


if __name__ == "__main__":
    torch.set_num_threads(1)
    device_name, *directories = sys.argv[1:]
    places = list(map(Path, directories))
    main(device_name, places[0], places[1], places[2] if len(places) > 2 else None)
