"""The models of an online run on one rank: policy, reference, critic, reward_models."""

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
from isotrain.engine.inference_model import InferenceModel
from isotrain.engine.step_scores import StepScores, of_classes, of_tokens
from isotrain.engine.world import World, join_world
from isotrain.models.load import load_tokenizer, model_directory
from isotrain.models.scalar import ScalarModel
from isotrain.recipe.online import Online, PpoSection, ProcessRewardSection, RewardSection
from isotrain.recipe.schema import ModelSection, Recipe
from isotrain.rollout.stopping import end_tokens
from isotrain.trainers.online.reward_models import (
    AGGREGATIONS,
    ProcessRewardModel,
    ResponseRewardModel,
    RewardModel,
)


@dataclass(frozen=True)
class Models:
    device: Device
    world: World
    policy: TrainingEngine
    reference: InferenceModel | None
    """None where no reference is needed, or where the policy without its adapters is the reference."""
    critic: TrainingEngine | None
    value_clip: float | None
    reward_models: dict[str, RewardModel]
    """By their name below `reward`."""
    rollout_dtype: torch.dtype

    def all(self) -> list[TrainingEngine | InferenceModel]:
        reward_models = [scorer.model for scorer in self.reward_models.values()]
        return [m for m in (self.policy, self.reference, self.critic, *reward_models) if m is not None]


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
        reward_models=build_reward_models(recipe.reward, model, recipe.data.tokens_per_micro_batch, **common),
        rollout_dtype=getattr(torch, model.dtype),
    )


def build_reward_models(
    reward: RewardSection, model: ModelSection, budget: int, *, device: Device, world: World
) -> dict[str, RewardModel]:
    reward_models: dict[str, RewardModel] = {}
    if reward.model is not None:
        scorer = build_reward_model(reward.model.path, model, device=device, world=world)
        policy = model_directory(model.path)
        closing = closing_tokens(load_tokenizer(policy))
        reward_models["model"] = ResponseRewardModel(scorer, budget, closing, end_tokens(policy))
    if reward.process is not None:
        reward_models["process"] = _steps(reward.process, model, budget, device, world)
    return reward_models


def _steps(
    process: ProcessRewardSection, model: ModelSection, budget: int, device: Device, world: World
) -> ProcessRewardModel:
    tokenizer = load_tokenizer(model_directory(process.path, "reward.process.path"))
    scorer = build_process_reward_model(process.path, model, device=device, world=world)
    step_scores: StepScores = of_classes
    if not isinstance(scorer.model, ScalarModel):
        bad = single_token(tokenizer, process.bad_token, "reward.process.bad_token")
        good = single_token(tokenizer, process.good_token, "reward.process.good_token")
        step_scores = of_tokens(bad, good)
    return ProcessRewardModel(
        scorer,
        budget,
        step_scores,
        tokenizer,
        process.step_separator,
        separator_tokens(tokenizer, process.step_separator, "reward.process.step_separator"),
        AGGREGATIONS[process.aggregate],
    )
