"""Training with Muon on several ranks: `python muon_ranks.py DEVICE MODELS OUT MESH`.

The first rank has all tokens: sums over ranks, and with them all numbers, are then those of one rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from jobs import SAMPLES, policy_objective, result_file, updates
from safetensors.torch import save_file

from isotrain.data.packing import pack
from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.checkpoint.reader import newest_valid
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.state import host_generators, optimizer_updates, restore, saved_shards
from isotrain.engine.world import World, join_world
from isotrain.recipe.schema import MeshSection, ModelSection, OptimizerSection
from isotrain.weights.send import full_weights

KINDS = ("dense", "mixture")
# The norm is summed in another order on each number of ranks: gradients are not clipped.
OPTIMIZER = OptimizerSection.model_validate({"name": "muon", "max_grad_norm": 0, "muon": {"lr_ratio": 2}})


def build(model: Path, device: Device, world: World) -> TrainingEngine:
    section = ModelSection.model_validate(
        {"path": str(model), "dtype": "float32", "logits_chunk": 16, "fused": "off"}
    )
    return build_engine(section, OPTIMIZER, device=device, world=world, seed=0)


def main(device_type: str, models: Path, out: Path, mesh: str) -> None:
    """Three updates, and the third again after a checkpoint: the whole weights of both."""
    device, shape, found = choose_device(device_type), MeshSection.model_validate_json(mesh), {}
    with join_world(device, shape=shape) as world:
        batches = [pack(SAMPLES if world.rank == 0 else [])]
        for kind in KINDS:
            engine, root = build(models / kind / "model", device, world), out / kind
            updates(engine, policy_objective, batches, steps=2)
            writer = CheckpointWriter(root, world.rank, world.size, keep=1)
            world.barrier()  # the first rank's writer clears the place before anyone writes
            writer.save(2, saved_shards(engine), host_generators(), {"updates": optimizer_updates(engine)})
            writer.wait()
            assert writer.failure() is None
            world.barrier()
            resumed = build(models / kind / "model", device, world)
            reader, complaints = newest_valid(root, world)
            assert reader is not None and not complaints
            restore(resumed, device, reader)
            for name, trained in (("trained", engine), ("resumed", resumed)):
                updates(trained, policy_objective, batches, steps=1)
                whole = full_weights(trained, torch.float32)
                found |= {f"{kind}/{name}/{weight}": t.cpu().clone() for weight, t in whole}
        out.mkdir(parents=True, exist_ok=True)
        save_file(found, result_file(out, world.rank))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
