"""Build a training rank of a recipe: its models, and the settings of its updates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from isotrain import plugins
from isotrain.algorithms.advantages import ADVANTAGES, Estimator
from isotrain.algorithms.aggregation import Loss
from isotrain.algorithms.policy_losses import POLICY_LOSSES
from isotrain.data.chat import closing_tokens, end_tokens
from isotrain.data.preference import separator_tokens, single_token
from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.device.determinism import make_deterministic
from isotrain.engine.build import (
    Load,
    build_critic,
    build_engine,
    build_process_reward_model,
    build_reference,
    build_reward_model,
    from_disk,
)
from isotrain.engine.engine import InferenceModel, TrainingEngine
from isotrain.engine.scores import StepScores, of_classes, of_tokens
from isotrain.engine.world import World, join_world
from isotrain.models.config import model_end_tokens
from isotrain.models.files import load_tokenizer, model_directory
from isotrain.models.packed import ScalarModel
from isotrain.models.routes import RouteReplay
from isotrain.plugins import Plugin, find_plugin
from isotrain.recipe.online import (
    CriticSection,
    GrpoSection,
    Online,
    PpoSection,
    ProcessRewardSection,
    ReinforcePlusPlusSection,
    RemaxSection,
    RewardSection,
)
from isotrain.recipe.policy_loss import (
    DistillationSection,
    PluginSection,
    RolloutCorrectionSection,
)
from isotrain.recipe.schema import ModelSection, Recipe
from isotrain.trainers.online.reward_models import (
    AGGREGATIONS,
    ProcessRewardModel,
    ResponseRewardModel,
    RewardModel,
)
from isotrain.trainers.online.step import AdvantageSettings, DistillationSettings, UpdateSettings


def build_models(recipe: Recipe, algorithm: Online, stack: ExitStack, store: str) -> Models:
    """Join the other ranks (left again when `stack` closes) and load all models that the recipe needs."""
    device = choose_device(recipe.device.type)
    world = stack.enter_context(join_world(device, store, recipe.device.mesh))
    make_deterministic(recipe.device.determinism)
    device.seed(recipe.seed + world.rank)
    return load_models(recipe, algorithm, device, world)


def load_models(
    recipe: Recipe, algorithm: Online, device: Device, world: World, load: Load = from_disk
) -> Models:
    """All models that the recipe needs, on ranks that have met."""
    assert recipe.reward is not None
    common: dict[str, Any] = {"device": device, "world": world, "load": load}
    model, optimizer, kl = recipe.model, recipe.optimizer, algorithm.kl
    policy = build_engine(model, optimizer, seed=recipe.seed, **common)
    teacher = None
    if (path := algorithm.distillation.path) is not None:
        teacher = build_reference(model.model_copy(update={"path": path, "perturbation": 0}), **common)
        teacher.model.eval()
    if algorithm.router_replay != "disabled":
        policy.model.replay = RouteReplay(policy.model.pretrained)
    needs_copy = kl.place != "off" and not model.lora.rank
    critic, value_clip = None, None
    if isinstance(algorithm, PpoSection):
        critic = build_critic(model, optimizer, path=algorithm.critic.path, **common)
        value_clip = algorithm.critic.clip
    return Models(
        device=device,
        world=world,
        policy=policy,
        reference=build_reference(model, **common) if needs_copy else None,
        teacher=teacher,
        critic=critic,
        value_clip=value_clip,
        reward_models=build_reward_models(
            recipe.reward, model, recipe.data.tokens_per_micro_batch, device=device, world=world
        ),
        rollout_dtype=getattr(torch, model.dtype),
    )


def build_reward_models(
    reward: RewardSection, model: ModelSection, budget: int, *, device: Device, world: World
) -> dict[str, RewardModel]:
    reward_models: dict[str, RewardModel] = {}
    if reward.model is not None:
        scorer = build_reward_model(reward.model.path, model, device=device, world=world)
        policy = model_directory(model.path)
        tokenizer = load_tokenizer(policy)
        ends = end_tokens(model_end_tokens(policy), tokenizer)
        reward_models["model"] = ResponseRewardModel(scorer, budget, closing_tokens(tokenizer), ends)
    if reward.process is not None:
        reward_models["process"] = _process_reward_model(reward.process, model, budget, device, world)
    return reward_models


def _process_reward_model(
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


def update_settings(recipe: Recipe, algorithm: Online) -> UpdateSettings:
    assert recipe.rollout is not None
    rollout, loss, kl = recipe.rollout, algorithm.loss, algorithm.kl
    critic = algorithm.critic if isinstance(algorithm, PpoSection) else CriticSection()
    return UpdateSettings(
        temperature=rollout.temperature,
        ppo_epochs=algorithm.ppo_epochs,
        loss=plugin_loss(loss.plugin) if loss.plugin else POLICY_LOSSES[loss.name],
        loss_options=loss.plugin.options if loss.plugin else loss.options,
        aggregation=loss.aggregates,
        critic_aggregation=critic.aggregation or loss.aggregates,
        horizon=rollout.max_tokens,
        entropy=loss.entropy,
        kl_place=kl.place,
        kl_estimator=kl.estimator,
        correction=_correction_options(algorithm.rollout_correction),
        bypass=algorithm.rollout_correction.bypass_mode,
        distillation=_distillation_settings(algorithm.distillation),
    )


def _distillation_settings(section: DistillationSection) -> DistillationSettings | None:
    if section.path is None:
        return None
    return DistillationSettings(
        section.loss,
        section.over_vocabulary,
        section.top_k,
        section.coefficient,
        section.clamp,
        section.task_rewards,
    )


def _correction_options(rollout_correction: RolloutCorrectionSection) -> dict[str, Any] | None:
    if rollout_correction.level == "off" and not rollout_correction.reject:
        return None
    return {
        "level": rollout_correction.level,
        "mode": rollout_correction.mode,
        "upper": rollout_correction.upper,
        "lower": rollout_correction.lower,
        "reject": rollout_correction.bounds,
    }


def advantage_settings(algorithm: Online, reward: RewardSection | None = None) -> AdvantageSettings:
    environment_weight = reward.environment.weight if reward and reward.environment else 0.0
    convention = algorithm.convention
    # What TRL has is not whitened.
    whitening: Literal["verl", "openrlhf"] = "openrlhf" if convention == "openrlhf" else "verl"
    if advantage := algorithm.advantage:
        has_critic = isinstance(algorithm, PpoSection)
        plugin = plugin_estimator(advantage, has_critic)
        return AdvantageSettings(plugin, advantage.options, whitening, environment_weight)
    estimator = ADVANTAGES[algorithm.name]
    options: dict[str, Any] = {} if isinstance(algorithm, RemaxSection) else {"convention": convention}
    if isinstance(algorithm, GrpoSection):
        options["scale_by_std"] = algorithm.scale_by_std
    if isinstance(algorithm, (PpoSection, ReinforcePlusPlusSection)):
        options["gamma"] = algorithm.gamma
    if isinstance(algorithm, PpoSection):
        options["lam"] = algorithm.lam
    return AdvantageSettings(estimator, options, whitening, environment_weight)


@dataclass(frozen=True)
class Models:
    device: Device
    world: World
    policy: TrainingEngine
    reference: InferenceModel | None
    """None where no reference is needed, or where the policy without its adapters is the reference."""
    teacher: InferenceModel | None
    critic: TrainingEngine | None
    value_clip: float | None
    reward_models: dict[str, RewardModel]
    """By their name below `reward`."""
    rollout_dtype: torch.dtype

    def all(self) -> list[InferenceModel]:
        reward_models = [scorer.model for scorer in self.reward_models.values()]
        return [
            m
            for m in (self.policy, self.reference, self.teacher, self.critic, *reward_models)
            if m is not None
        ]


_NEEDS = ("values_N", "greedy_R")


def plugin_estimator(section: PluginSection, has_critic: bool) -> Estimator:
    """An `Estimator` of another package, with checked results."""
    plugin = find_plugin(plugins.ADVANTAGES, section.name, "algorithm.advantage.name")
    estimator = plugin.load()
    if not isinstance(estimator, Estimator):
        raise plugin.wrong(f"is of {type(estimator)}, not an isotrain.algorithms.advantages.Estimator")
    if estimator.per not in ("trajectory", "token") or not set(estimator.needs) <= {*_NEEDS}:
        known = " and ".join(_NEEDS)
        raise plugin.wrong(f"has per={estimator.per!r}, needs={estimator.needs!r}; allowed needs are {known}")
    if estimator.per == "trajectory" and estimator.needs:
        raise plugin.wrong("needs more than rewards and groups, which only per-token estimators get")
    if "values_N" in estimator.needs and not has_critic:
        raise plugin.wrong("needs a critic's values_N: write algorithm.name: ppo")
    if estimator.per == "trajectory" and has_critic:
        raise plugin.wrong("gives no returns for ppo's critic: write another algorithm.name")
    plugin.check_options(estimator.function, section.options)
    return replace(estimator, function=_checked(plugin, estimator))


def _checked(plugin: Plugin, estimator: Estimator) -> Callable[..., Any]:
    count = 1 if estimator.per == "trajectory" else 2

    def function(rewards: torch.Tensor, *rest: Any, **options: Any) -> Any:
        result = estimator.function(rewards, *rest, **options)
        parts = (result,) if count == 1 else result
        fits = isinstance(parts, tuple) and len(parts) == count
        if not fits or any(getattr(part, "shape", None) != rewards.shape for part in parts):
            expected = "advantages_R" if count == 1 else "(advantages_N, returns_N)"
            raise plugin.wrong(f"must return {expected}, as long as the {len(rewards)} rewards it was given")
        return result

    return function


def plugin_loss(section: PluginSection) -> Callable[..., Loss]:
    """A policy loss of another package, with checked results."""
    ours = {name: f"algorithm.loss.name: {name}" for name in POLICY_LOSSES}
    plugin = find_plugin(plugins.POLICY_LOSSES, section.name, "algorithm.loss.plugin.name", ours)
    loss = plugin.load()
    if not callable(loss):
        raise plugin.wrong("is not a function")
    plugin.check_options(loss, {**section.options, "aggregation": "token-mean", "correction_N": None})

    def function(*tensors: Any, **options: Any) -> Loss:
        result = loss(*tensors, **options)
        pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        if not pair or getattr(result[0], "shape", None) != torch.Size([]):
            raise plugin.wrong("must return (loss, metrics): a single number and a dict of numbers")
        return result[0], result[1]

    return function
