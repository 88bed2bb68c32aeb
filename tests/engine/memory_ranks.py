"""Training with less device memory: `python memory_ranks.py MODEL OUT KIND`, on the simulated npu."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
from jobs import Tensors, numbers, policy_objective, result_file, sample, updates
from safetensors.torch import save_file

from isotrain.data.packing import pack
from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine, build_reference
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.offload import offload, onload
from isotrain.engine.state import engine_shards
from isotrain.engine.world import World, join_world
from isotrain.models.packed import TokenHead
from isotrain.recipe.schema import ModelSection, OptimizerSection
from isotrain.weights.send import full_weights

STEPS = 2
BATCHES = [pack([sample(length, seed) for seed, length in enumerate((250, 350, 150))])] * 2

CHOICES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "weights": {"offload": {"weights": True}},
    "optimizer": {"offload": {"optimizer": True}},
    "activations": {"offload": {"activations": True}},
    "everything": {"offload": {"weights": True, "activations": True}},
}
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "adapters": {"dtype": "bfloat16", "lora": {"rank": 4}},
}


def train(model: dict[str, Any], device: Device, world: World, optimizer: OptimizerSection) -> Tensors:
    section = ModelSection.model_validate({"logits_chunk": 16, "fused": "off", **model})
    module = torch.get_device_module(world.device)
    gc.collect()
    before = device.memory().allocated
    engine = build_engine(section, optimizer, device=device, world=world, seed=0)
    updates(engine, policy_objective, BATCHES, steps=1)
    engine.reshard()
    held = device.memory().allocated - before
    module.reset_peak_memory_stats()
    found = numbers(updates(engine, policy_objective, BATCHES, steps=STEPS))
    peak = device.memory().peak - before
    logps = torch.cat(engine.infer(BATCHES, TokenHead.logps))
    result = {"numbers": found, "bytes": torch.tensor([held, peak]), "logps": logps}
    result |= {"saved": torch.tensor(saved_numbers_stay(engine))}
    return {k: v.cpu() for k, v in (result | dict(full_weights(engine, torch.float32))).items()}


def saved_numbers_stay(engine: TrainingEngine) -> bool:
    """Whether what a colocated run saves while its models are away is not changed by the next update."""
    offload(engine)
    saved = {name: shard.local for name, shard in engine_shards(engine).items()}
    copies = {name: tensor.clone() for name, tensor in saved.items()}
    onload(engine)
    updates(engine, policy_objective, BATCHES, steps=1)
    return all(torch.equal(copies[name], tensor) for name, tensor in saved.items())


def reference(options: dict[str, Any], device: Device, world: World) -> Tensors:
    found = {}
    for choice in ("nothing", "weights"):
        section = ModelSection.model_validate({"fused": "off", **options, **CHOICES[choice]})
        gc.collect()
        before = device.memory().allocated
        frozen = build_reference(section, device=device, world=world)
        logps = torch.cat(frozen.infer(BATCHES, TokenHead.logps)).cpu()
        held = torch.tensor(device.memory().allocated - before)
        found |= {f"reference/{choice}/logps": logps, f"reference/{choice}/bytes": held}
        del frozen
    return found


def main(model: str, out: Path, kind: str) -> None:
    device = choose_device("npu")
    found: Tensors = {}
    with join_world(device) as world:
        options = {"path": model, **KINDS[kind]}
        if kind != "float32":  # flash attention keeps a mask from its first call on
            train(options, device, world, OptimizerSection())
        for choice, offloads in CHOICES.items():
            told = train({**options, **offloads}, device, world, OptimizerSection())
            found |= {f"{choice}/{name}": tensor for name, tensor in told.items()}
        for choice in ("nothing", "optimizer"):
            shorter = OptimizerSection(state_dtype="bfloat16")
            told = train({**options, **CHOICES[choice]}, device, world, shorter)
            found |= {f"short/{choice}/{name}": tensor for name, tensor in told.items()}
        found |= reference(options, device, world)
        save_file({name: t.contiguous().clone() for name, t in found.items()}, result_file(out, world.rank))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
