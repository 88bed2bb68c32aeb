"""What any number of ranks of an online run do with engines: `python jobs.py DEVICE MODEL OUT`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from isotrain.data.items import Sample
from isotrain.data.packing import PackedBatch, pack
from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_critic, build_engine, build_reference
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.engine.engine import InferenceModel, LossScale, Objective, TrainingEngine, UpdateResult
from isotrain.engine.offload import offload, onload
from isotrain.engine.state import (
    engine_shards,
    generator_shards,
    host_generators,
    optimizer_updates,
    saved_counts,
)
from isotrain.engine.world import World, join_world
from isotrain.models.lora import adapters_off
from isotrain.models.packed import ScalarHead, TokenHead
from isotrain.models.weights import shard_of
from isotrain.recipe.schema import ModelSection, OptimizerSection
from isotrain.weights.send import full_weights

Tensors = dict[str, torch.Tensor]

STEPS = 3
LR = 1e-3


def sample(length: int, seed: int) -> Sample:
    """A prompt of three tokens and a response."""
    draw = np.random.default_rng(seed)
    return Sample(draw.integers(3, 500, length).astype(np.int32), np.arange(length) >= 3)


SAMPLES = [sample(length, seed) for seed, length in enumerate((12, 7, 20, 9, 31, 5))]
TOKENS = sum(int(one.mask_T.sum()) for one in SAMPLES)


def split(ranks: int, rank: int) -> list[PackedBatch]:
    """The same samples on any number of ranks; the last of two has an empty micro-batch."""
    if ranks == 1:
        return [pack(SAMPLES)]
    return [[pack(SAMPLES[:1]), pack(SAMPLES[1:3])], [pack(SAMPLES[3:]), pack([])]][rank]


def policy_objective(batch: PackedBatch, entropy: float = 0.02, temperature: float = 0.7) -> Objective:
    """A policy gradient whose advantages are a function of the token, and a bonus for entropy."""

    def objective(head: TokenHead) -> tuple[torch.Tensor, Tensors]:
        logp_N, entropy_N = head.logps_and_entropies(temperature)
        advantage_N = batch.targets_N.float().sin().to(logp_N.device)
        loss = -(advantage_N * logp_N + entropy * entropy_N).sum() / TOKENS
        return loss, {"entropy": entropy_N.detach().sum() / TOKENS, "tokens": torch.tensor(len(logp_N))}

    return objective


def critic_objective(batch: PackedBatch) -> Objective:
    def objective(head: ScalarHead) -> tuple[torch.Tensor, Tensors]:
        values_N = head.values()
        returns_N = 3 + batch.targets_N.float().cos().to(values_N.device)
        return (values_N - returns_N).square().sum() / TOKENS, {"value": values_N.detach().sum() / TOKENS}

    return objective


def updates(
    engine: TrainingEngine,
    objective: Callable[[PackedBatch], Objective],
    batches: list[PackedBatch],
    steps: int = STEPS,
) -> list[UpdateResult]:
    return [engine.update([(batch, objective(batch)) for batch in batches], LR) for _ in range(steps)]


def numbers(results: list[UpdateResult]) -> torch.Tensor:
    assert all(result.applied for result in results)
    rows = [[r.loss, r.grad_norm, *r.metrics.values()] for r in results]
    return torch.tensor(rows, dtype=torch.float64)


def local(engine: TrainingEngine) -> Tensors:
    """This rank's part of everything that training changes."""
    return {name: shard.local.detach().cpu().clone() for name, shard in engine_shards(engine).items()}


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@dataclass
class Job:
    device: Device
    world: World
    model: Path

    def section(self, **model: Any) -> ModelSection:
        return ModelSection.model_validate(
            {"path": str(self.model), "dtype": "float32", "logits_chunk": 16, "fused": "off", **model}
        )

    def policy(self, **model: Any) -> TrainingEngine:
        place: dict[str, Any] = {"device": self.device, "world": self.world}
        return build_engine(self.section(**model), OptimizerSection(), seed=0, **place)

    def critic(self, **model: Any) -> TrainingEngine:
        place: dict[str, Any] = {"device": self.device, "world": self.world}
        return build_critic(self.section(**model), OptimizerSection(), path=None, **place)

    def reference(self, **model: Any) -> InferenceModel:
        return build_reference(self.section(**model), device=self.device, world=self.world)

    @property
    def batches(self) -> list[PackedBatch]:
        return split(self.world.size, self.world.rank)

    def save(self, root: Path, policy: TrainingEngine, critic: TrainingEngine | None = None) -> None:
        shards, state = engine_shards(policy) | generator_shards(self.device), {}
        if critic is not None:
            shards |= engine_shards(critic, prefix="critic/")
            state["critic/updates"] = optimizer_updates(critic)
        writer = CheckpointWriter(root, self.world.rank, self.world.size, keep=1)
        self.world.barrier()  # the first rank's writer clears the place before anyone writes
        writer.save(STEPS, shards, host_generators(), {**saved_counts(policy), **state})
        writer.wait()
        if failure := writer.failure():
            raise RuntimeError(failure)


def train(job: Job, out: Path) -> Tensors:
    """Policy and critic, their numbers and the policy's whole weights; one checkpoint of both."""
    policy, critic = job.policy(), job.critic()
    first = torch.cat(critic.infer(job.batches, ScalarHead.values)).cpu()
    found = {
        "policy": numbers(updates(policy, policy_objective, job.batches)),
        "critic": numbers(updates(critic, critic_objective, job.batches)),
        "critic first values": first,
    }
    found["float16"] = scaled(job.policy(dtype="float16"), job.batches)
    streamed = dict(full_weights(policy, torch.float32))
    found |= {f"full/{name}": tensor.cpu() for name, tensor in streamed.items()}
    job.save(out / "full" / "checkpoints", policy, critic)
    return found


def scaled(engine: TrainingEngine, batches: list[PackedBatch]) -> torch.Tensor:
    """Updates of which the first overflow: how many of these, then loss and gradient norm of the others.

    How large a scale may be depends on what a micro-batch sums up, and so on the number of ranks.
    """
    engine.loss_scale = LossScale(2.0**22)
    work, results = [(batch, policy_objective(batch)) for batch in batches], list[UpdateResult]()
    while sum(result.applied for result in results) < STEPS:
        results.append(engine.update(work, LR))
    rows = [[result.loss, result.grad_norm] for result in results if result.applied]
    return torch.tensor([[engine.loss_scale.skipped, len(results)], *rows], dtype=torch.float64)


def train_adapters(job: Job, out: Path) -> Tensors:
    """The same with adapters, and what the base model below them says."""
    policy, reference = job.policy(lora={"rank": 4}), job.reference()
    found = {"lora": numbers(updates(policy, policy_objective, job.batches))}
    with adapters_off(policy.model):
        base = policy.infer(job.batches, TokenHead.logps)
    expected = reference.infer(job.batches, TokenHead.logps)
    adapted = policy.infer(job.batches, TokenHead.logps)
    found["base differs"] = torch.stack(
        [(a - b).abs().sum() for a, b in zip(base, expected, strict=True)]
    ).sum()
    found["adapters differ"] = torch.stack(
        [(a - b).abs().sum() for a, b in zip(adapted, expected, strict=True)]
    ).sum()
    streamed = dict(full_weights(policy, torch.float32))
    found |= {f"merged/{name}": tensor.cpu() for name, tensor in streamed.items()}
    job.save(out / "lora" / "checkpoints", policy)
    return {name: tensor.cpu() for name, tensor in found.items()}


def offloaded(
    job: Job, build: Callable[[], TrainingEngine], objective: Callable[[Any], Objective]
) -> Tensors:
    """Bytes on the device before, while and after an engine is away, and whether its training noticed."""
    expected = build()
    updates(expected, objective, job.batches, steps=2)
    nothing = job.device.memory().allocated
    engine = build()
    updates(engine, objective, job.batches, steps=1)
    before = job.device.memory().allocated
    offload(engine)
    offload(engine)
    away = job.device.memory().allocated
    onload(engine)
    onload(engine)
    after = job.device.memory().allocated
    updates(engine, objective, job.batches, steps=1)
    unchanged = same(local(engine), local(expected))
    return {"bytes": torch.tensor([nothing, before, away, after]), "same": torch.tensor(unchanged)}


def offloads(job: Job) -> Tensors:
    found: Tensors = {}
    for name, build, objective in (
        ("policy", job.policy, policy_objective),
        ("lora", lambda: job.policy(lora={"rank": 4}, dtype="bfloat16"), policy_objective),
        ("critic", lambda: job.critic(dtype="bfloat16"), critic_objective),
    ):
        result = offloaded(job, build, objective)
        found |= {f"offload/{name}/{key}": value for key, value in result.items()}
    reference = job.reference(dtype="bfloat16")
    first = reference.infer(job.batches, TokenHead.logps)
    before = job.device.memory().allocated
    offload(reference)
    held = sum(shard_of(p).local.numel() * 2 for p in reference.parameters.values())
    found["offload/reference/freed"] = torch.tensor([before - job.device.memory().allocated, held])
    onload(reference)
    again = reference.infer(job.batches, TokenHead.logps)
    found["offload/reference/same"] = torch.tensor(all(map(torch.equal, first, again)))
    return found


def run(device_type: str, model: Path, out: Path) -> None:
    device = choose_device(device_type)
    with join_world(device) as world:
        job = Job(device, world, model)
        found = train(job, out) | train_adapters(job, out)
        if device_type != "cpu":
            found |= offloads(job)
        out.mkdir(parents=True, exist_ok=True)
        save_file({name: t.contiguous().clone() for name, t in found.items()}, result_file(out, world.rank))


def result_file(out: Path, rank: int) -> Path:
    return out / f"rank-{rank}.safetensors"


def results(out: Path, ranks: int) -> list[Tensors]:
    return [load_file(result_file(out, rank)) for rank in range(ranks)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
