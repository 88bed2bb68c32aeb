"""Training over a mesh: `python mesh_ranks.py DEVICE MODELS OUT CONTEXT REPLICAS EXPERT [CASE ...]`.

CONTEXT, REPLICAS and EXPERT 1 on one rank is what the others must equal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jobs import (
    SAMPLES,
    Tensors,
    critic_objective,
    numbers,
    policy_objective,
    result_file,
    sample,
    updates,
)
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from isotrain.data.items import Sample
from isotrain.data.packing import PackedBatch, pack, pack_shared
from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_critic, build_engine
from isotrain.engine.checkpoint.reader import newest_valid
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.engine.engine import Objective, TrainingEngine
from isotrain.engine.state import (
    engine_shards,
    generator_shards,
    host_generators,
    optimizer_updates,
    restore,
    saved_shards,
)
from isotrain.engine.world import World, join_world
from isotrain.models.packed import TokenHead
from isotrain.recipe.schema import MeshSection, ModelSection, OptimizerSection
from isotrain.weights.send import full_weights

STEPS = 24

PACKED = [pack(SAMPLES[:4]), pack(SAMPLES[4:])]


def _shared() -> list[PackedBatch]:
    """Four responses to one prompt, two to another, and a sample by itself; an empty one, too."""
    found = []
    for seed, prompt, lengths in ((10, 9, (4, 11, 4, 30)), (11, 5, (8, 8)), (12, 6, (13,))):
        first = sample(prompt, seed).tokens_T
        for i, length in enumerate(lengths):
            rest = sample(length, 100 * seed + i).tokens_T
            tokens_T = torch.cat([torch.from_numpy(first), torch.from_numpy(rest)]).numpy()
            mask_T = torch.arange(len(tokens_T)).ge(prompt).numpy()
            found.append((Sample(tokens_T, mask_T), prompt))
    return [pack_shared([one for one, _ in found], [prompt for _, prompt in found]), pack([])]


SHARED = _shared()


def sft(batch: PackedBatch) -> Objective:
    def objective(head: TokenHead) -> tuple[torch.Tensor, Tensors]:
        return head.nll_share(100), {}

    return objective


Case = tuple[str, list[PackedBatch], Callable[[PackedBatch], Objective], dict[str, Any]]
CASES: dict[str, Case] = {
    "sft": ("tiny", PACKED, sft, {}),
    "policy": ("tiny", PACKED, policy_objective, {}),
    "without checkpointing": ("tiny", PACKED, policy_objective, {"gradient_checkpointing": False}),
    "shared prompts": ("tiny", SHARED, policy_objective, {}),
    "adapters": ("tiny", SHARED, policy_objective, {"lora": {"rank": 4}}),
    "critic": ("tiny", PACKED, critic_objective, {}),
    "window": ("windowed", PACKED, policy_objective, {}),
    "window over shared prompts": ("windowed", SHARED, policy_objective, {}),
    "mixture": ("mixture", SHARED, policy_objective, {"router_aux_loss": 0.3}),
    "capped head": ("capped", SHARED, policy_objective, {}),
}
# Only where they are asked for.
MORE: dict[str, Case] = {
    # On devices that have fused operators; on others it is the mixture as it is.
    "fused mixture": ("mixture", SHARED, policy_objective, {"router_aux_loss": 0.3, "fused": "auto"}),
    "few experts": ("few experts", SHARED, policy_objective, {"router_aux_loss": 0.3}),
}


def train(case: Case, models: Path, out: Path, device: Device, world: World) -> Tensors:
    name, batches, objective, options = case
    section = ModelSection.model_validate(
        {
            "path": str(models / name / "model"),
            "dtype": "float32",
            "logits_chunk": 16,
            "fused": "off",
            **options,
        }
    )
    engine: TrainingEngine = (
        build_critic(section, OptimizerSection(), path=None, device=device, world=world)
        if objective is critic_objective
        else build_engine(section, OptimizerSection(), device=device, world=world, seed=0)
    )
    own = batches if world.data_ranks == 1 else [[*batches, pack([]), pack([])][world.data_rank]]
    found = {"numbers": numbers(updates(engine, objective, own, STEPS))}
    if objective is policy_objective and world.data_ranks == 1:
        found["logps"] = torch.cat(engine.infer(batches, TokenHead.logps)).cpu()
    if world.shape.replicas > 1 or world.shape.expert > 1:
        kind = world.shape.context_attention
        save(engine, device, world, out / "checkpoints" / kind / ("adapters" if section.lora.rank else "all"))
    return found | {name: t.cpu() for name, t in full_weights(engine, torch.float32)}


def save(engine: TrainingEngine, device: Device, world: World, root: Path) -> None:
    writer = CheckpointWriter(root, world.rank, world.size, keep=1)
    world.barrier()  # the first rank's writer clears the place before anyone writes
    shards = saved_shards(engine) | generator_shards(device)
    writer.save(STEPS, shards, host_generators(), {"updates": optimizer_updates(engine)})
    writer.wait()
    assert writer.failure() is None
    # Back from what was saved, each copy from the first one's files.
    before = {name: shard.local.clone() for name, shard in engine_shards(engine).items()}
    for shard in engine_shards(engine).values():
        shard.local.zero_()
    world.barrier()
    reader, complaints = newest_valid(root, world)
    assert reader is not None and not complaints
    restore(engine, device, reader)
    assert all(torch.equal(before[name], shard.local) for name, shard in engine_shards(engine).items())
    # Whoever reads the files, on whatever mesh, finds the whole weights.
    for name, parameter in engine.trained.items():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(reader.whole(f"weights/{name}"), whole.detach().cpu())


def main(
    device_type: str, models: Path, out: Path, context: int, replicas: int, expert: int, only: list[str]
) -> None:
    device = choose_device(device_type)
    shape = MeshSection(context=context, replicas=replicas, expert=expert)
    kinds = ["ulysses", "ring"] if context == 2 else ["auto", "ring"] if context > 1 else ["auto"]
    results = {}
    with join_world(device, shape=shape) as world:
        for kind in kinds:
            as_kind = replace(world, shape=shape.model_copy(update={"context_attention": kind}))
            for name in only or CASES:
                found = train({**CASES, **MORE}[name], models, out, device, as_kind)
                results |= {f"{kind}/{name}/{key}": tensor.contiguous() for key, tensor in found.items()}
        save_file({name: tensor.clone() for name, tensor in results.items()}, result_file(out, world.rank))


if __name__ == "__main__":
    torch.set_num_threads(1)
    directories, shape = map(Path, sys.argv[2:4]), map(int, sys.argv[4:7])
    main(sys.argv[1], *directories, *shape, sys.argv[7:])
