"""The models of an online run on one rank: policy, reference, critic, reward model."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_critic, build_engine, build_reference, build_reward_model
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.frozen import Frozen
from isotrain.engine.world import World, join_world
from isotrain.recipe.online import Online, PpoSection
from isotrain.recipe.schema import Recipe


@dataclass(frozen=True)
class Models:
    device: Device
    world: World
    policy: TrainingEngine
    reference: Frozen | None
    """None where no reference is needed, or where the policy without its adapters is the reference."""
    critic: TrainingEngine | None
    value_clip: float | None
    reward_model: Frozen | None
    rollout_dtype: torch.dtype

    def all(self) -> list[TrainingEngine | Frozen]:
        return [m for m in (self.policy, self.reference, self.critic, self.reward_model) if m is not None]


def build_models(recipe: Recipe, algorithm: Online, stack: ExitStack, store: str) -> Models:
    """Join the other ranks (left again when `stack` closes) and load all models that the recipe needs."""
    assert recipe.reward is not None
    device = choose_device(recipe.device.type)
    world = stack.enter_context(join_world(device, store))
    if recipe.device.deterministic:
        device.make_deterministic()
    device.seed(recipe.seed + world.rank)
    common: dict[str, Any] = {"device": device, "world": world}
    model, optimizer, kl = recipe.model, recipe.optimizer, algorithm.kl
    policy = build_engine(model, optimizer, seed=recipe.seed, **common)
    needs_copy = kl.place != "off" and not model.lora.rank
    critic, value_clip = None, None
    if isinstance(algorithm, PpoSection):
        path, lr = algorithm.critic.path, algorithm.critic.lr
        critic = build_critic(model, optimizer, path=path, lr=lr, seed=recipe.seed, **common)
        value_clip = algorithm.critic.clip
    judge = recipe.reward.model
    return Models(
        device=device,
        world=world,
        policy=policy,
        reference=build_reference(model, **common) if needs_copy else None,
        critic=critic,
        value_clip=value_clip,
        reward_model=build_reward_model(judge.path, model, **common) if judge else None,
        rollout_dtype=getattr(torch, model.dtype),
    )
