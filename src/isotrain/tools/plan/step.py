"""The real training step of a recipe, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from isotrain.data.packing import pack_trajectories
from isotrain.device.base import Device
from isotrain.engine.build import Load, from_disk, place
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.state import start_optimizer_state
from isotrain.engine.world import World
from isotrain.models.attention import shares_prompts
from isotrain.models.packed import Backbone
from isotrain.models.weights import shard_of
from isotrain.recipe.load import resolved
from isotrain.recipe.online import OnlineSection
from isotrain.recipe.schema import ModelSection, Recipe
from isotrain.tools.plan.fake import TYPE, FakeDevice, fake_attention, fake_world
from isotrain.tools.plan.ledger import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    INFERENCE,
    OPTIMIZER,
    UPDATE,
    Ledger,
    Peak,
)
from isotrain.tools.plan.workload import step_data, trajectories
from isotrain.trainers.build import build_task
from isotrain.trainers.online.build_rank import load_models
from isotrain.trainers.online.messages import RankScores, RankStep, Totals
from isotrain.trainers.online.policy_rank import PolicyRank
from isotrain.trainers.online.step import Micro

LR = 1e-6

During = Callable[[list[TrainingEngine]], AbstractContextManager[None]]


@dataclass(frozen=True)
class Usage:
    """Memory of one rank, in bytes."""

    peaks: dict[str, Peak]
    """On the device, in each phase of a step."""
    host: int
    parameters: tuple[int, int, int]
    """Parameters in matrix products, the trained ones among them, and all."""
    communicators: tuple[int, int]
    """Of groups of ranks, and of those whose ranks send to single others."""


def fake_step(recipe: Recipe, ranks: int, micro_batches: int) -> Usage:
    """One step of the first rank, with optimizer state as after an earlier one."""
    device, ledger = FakeDevice(), Ledger(TYPE)

    def load(packed: Backbone, model: ModelSection, world: World, _: Path) -> dict[str, nn.Parameter]:
        with ledger.fake():
            return place(packed, model, world)

    with fake_world(device, ranks, recipe.device.mesh) as world, fake_attention():
        engine = run_step(recipe, device, world, micro_batches, partial(_watched, ledger), load)
        everything = sum(p.numel() for p in engine.model.parameters())
        to_one = sum(single for _, single in ledger.communicators)
        communicators = (len(ledger.communicators) - to_one, to_one)
        return Usage(ledger.peaks, ledger.host_peak, (*engine.parameter_counts, everything), communicators)


def run_step(
    recipe: Recipe,
    device: Device,
    world: World,
    micro_batches: int,
    during: During,
    load: Load = from_disk,
) -> TrainingEngine:
    """Run one step of full micro-batches on a rank, within `during`; returns the trained engine."""
    if isinstance(recipe.algorithm, OnlineSection):
        return _online_step(recipe, device, world, micro_batches, during, load)
    engine, task = build_task(recipe, device=device, world=world, load=load)
    data = step_data(recipe, micro_batches)
    with during([engine]):
        task.update(data, LR)
    return engine


def _online_step(
    recipe: Recipe, device: Device, world: World, micro_batches: int, during: During, load: Load
) -> TrainingEngine:
    """Between the responses of a step and new weights."""
    algorithm = recipe.algorithm
    assert isinstance(algorithm, OnlineSection) and recipe.rollout is not None
    rank = PolicyRank(resolved(recipe))
    rank.models = load_models(recipe, algorithm, device, world, load)
    rank.device, rank.world, rank.policy = device, world, rank.models.policy
    nothing: Any = SimpleNamespace(writer=SimpleNamespace(failure=lambda: None))
    rank.checkpoints = nothing
    sharing = recipe.rollout.n > 1 and all(shares_prompts(m.model.attention) for m in rank.models.all())
    full = trajectories(recipe, sharing)
    numbers = [range(i * len(full), (i + 1) * len(full)) for i in range(micro_batches)]
    rank.minis = [[Micro(pack_trajectories(full, list(batch), sharing)) for batch in numbers]]
    everything = [i for batch in numbers for i in batch]
    rank.totals = [Totals(tokens=len(everything) * recipe.rollout.max_tokens, sequences=len(everything))]
    zeros = dict.fromkeys(everything, 0.0)
    per_trajectory = rank.estimation.estimator.per == "trajectory"
    given = RankScores(zeros, zeros if per_trajectory else None, zeros, algorithm.kl.coefficient)
    critic_lr = None if rank.models.critic is None else LR
    with during([model for model in rank.models.all() if isinstance(model, TrainingEngine)]):
        rank._batches_to_device()
        rank.learn(RankStep(given, LR, critic_lr, old_logps=True, updates_policy=True, record=None))
    return rank.policy


@contextmanager
def _watched(ledger: Ledger, trained: list[TrainingEngine]) -> Iterator[None]:
    """On fake tensors; tell the ledger what all models are doing, by hooks that do nothing else."""

    def gradients() -> list[torch.Tensor]:
        return [
            shard_of(p.grad).local
            for engine in trained
            for p in engine.trained.values()
            if p.grad is not None
        ]

    def before(module: nn.Module, *_: Any) -> None:
        if not isinstance(module, Backbone):
            return
        ledger.rename(gradients(), GRADIENTS)
        ledger.enter(FORWARD if torch.is_grad_enabled() else INFERENCE)

    def after(module: nn.Module, *_: Any) -> None:
        if isinstance(module, Backbone):
            ledger.enter(BACKWARD if torch.is_grad_enabled() else INFERENCE)

    def updating(*_: Any) -> None:
        ledger.rename(gradients(), GRADIENTS)
        ledger.enter(UPDATE)

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    handles += [engine.optimizer.register_step_pre_hook(updating) for engine in trained]
    try:
        with ledger.fake():
            ledger.purpose = OPTIMIZER
            for engine in trained:
                start_optimizer_state(engine)
            yield
    finally:
        for handle in handles:
            handle.remove()
