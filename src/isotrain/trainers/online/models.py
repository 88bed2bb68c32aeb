"""The models of an online run on one rank: policy, reference, critic, judges."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from isotrain.data.chat import closing_tokens
from isotrain.data.steps import separator_tokens, single_token
from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.device.determinism import make_deterministic
from isotrain.engine.build import (
    build_critic,
    build_engine,
    build_process_reward_model,
    build_reference,
    build_reward_model,
)
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.frozen import Frozen
from isotrain.engine.verdicts import Verdicts, of_classes, of_tokens
from isotrain.engine.world import World, join_world
from isotrain.models.load import load_tokenizer, model_directory
from isotrain.models.scalar import ScalarModel
from isotrain.recipe.online import Online, PpoSection, ProcessRewardSection, RewardSection
from isotrain.recipe.schema import ModelSection, Recipe
from isotrain.rollout.stopping import end_tokens
from isotrain.trainers.online.judges import AGGREGATIONS, Judge, Steps, WholeAnswers


@dataclass(frozen=True)
class Models:
    device: Device
    world: World
    policy: TrainingEngine
    reference: Frozen | None
    """None where no reference is needed, or where the policy without its adapters is the reference."""
    critic: TrainingEngine | None
    value_clip: float | None
    judges: dict[str, Judge]
    """By their name below `reward`."""
    rollout_dtype: torch.dtype

    def all(self) -> list[TrainingEngine | Frozen]:
        judges = [judge.model for judge in self.judges.values()]
        return [m for m in (self.policy, self.reference, self.critic, *judges) if m is not None]


def build_models(recipe: Recipe, algorithm: Online, stack: ExitStack, store: str) -> Models:
    """Join the other ranks (left again when `stack` closes) and load all models that the recipe needs."""
    assert recipe.reward is not None
    device = choose_device(recipe.device.type)
    world = stack.enter_context(join_world(device, store))
    make_deterministic(recipe.device.determinism)
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
    return Models(
        device=device,
        world=world,
        policy=policy,
        reference=build_reference(model, **common) if needs_copy else None,
        critic=critic,
        value_clip=value_clip,
        judges=build_reward_models(recipe.reward, model, recipe.data.tokens_per_micro_batch, **common),
        rollout_dtype=getattr(torch, model.dtype),
    )


def build_reward_models(
    reward: RewardSection, model: ModelSection, budget: int, *, device: Device, world: World
) -> dict[str, Judge]:
    judges: dict[str, Judge] = {}
    if reward.model is not None:
        scorer = build_reward_model(reward.model.path, model, device=device, world=world)
        policy = model_directory(model.path)
        closing = closing_tokens(load_tokenizer(policy))
        judges["model"] = WholeAnswers(scorer, budget, closing, end_tokens(policy))
    if reward.process is not None:
        judges["process"] = _steps(reward.process, model, budget, device, world)
    return judges


def _steps(
    process: ProcessRewardSection, model: ModelSection, budget: int, device: Device, world: World
) -> Steps:
    tokenizer = load_tokenizer(model_directory(process.path, "reward.process.path"))
    judge = build_process_reward_model(process.path, model, device=device, world=world)
    verdicts: Verdicts = of_classes
    if not isinstance(judge.model, ScalarModel):
        bad = single_token(tokenizer, process.bad_token, "reward.process.bad_token")
        good = single_token(tokenizer, process.good_token, "reward.process.good_token")
        verdicts = of_tokens(bad, good)
    return Steps(
        judge,
        budget,
        verdicts,
        tokenizer,
        process.step_separator,
        separator_tokens(tokenizer, process.step_separator, "reward.process.step_separator"),
        AGGREGATIONS[process.aggregate],
    )
