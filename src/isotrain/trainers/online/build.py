"""Build the online loop of a recipe from its workers; build_rank.py builds a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from isotrain.algorithms.kl import AdaptiveKl, FixedKl
from isotrain.cluster.replaceable import Replaceable
from isotrain.data.encode import Prompt
from isotrain.data.loader import Sampler
from isotrain.data.store import SampleStore
from isotrain.engine.optimizer import Schedule, make_schedule
from isotrain.models.config import vocabulary_size
from isotrain.models.files import model_directory
from isotrain.models.load import read_config
from isotrain.recipe.online import ClusterSection, OnlineSection, PpoSection
from isotrain.recipe.policy_loss import KlSection
from isotrain.recipe.schema import Recipe
from isotrain.rollout.base import Sampling
from isotrain.trainers.build import TRAIN, VALIDATION, total_steps
from isotrain.trainers.job import Recorder, ResumeState, build_job
from isotrain.trainers.online.build_rank import advantage_settings
from isotrain.trainers.online.engines import Engines
from isotrain.trainers.online.loop import OnlineProgress, OnlineTrainer
from isotrain.trainers.online.policy_rank import Description
from isotrain.trainers.online.recording import Replayed, trajectories
from isotrain.trainers.online.rollouts import (
    AsyncBatches,
    BatchMaker,
    Collector,
    Maker,
    RolloutProgress,
    SyncBatches,
)
from isotrain.trainers.online.weight_sync import WeightSync
from isotrain.trainers.online.worker_groups import WorkerGroups, demand_of
from isotrain.trainers.preemption import Preemption
from isotrain.weights.check import TOLERANCE, Tolerance, check_prompts
from isotrain.weights.update import update_limit


def build_trainer(
    recipe: Recipe,
    cluster: ClusterSection,
    stores: Mapping[str, SampleStore[Prompt]],
    groups: WorkerGroups,
    described: Description,
    recorder: Recorder,
    resumed: ResumeState,
    preemption: Preemption | None = None,
) -> OnlineTrainer:
    """The loop, ready to go on after the step that a checkpoint was taken at, with its weights sent out."""
    algorithm, rollout, reward = recipe.algorithm, recipe.rollout, recipe.reward
    assert isinstance(algorithm, OnlineSection) and rollout is not None and reward is not None
    steps = total_steps(recipe, len(stores[TRAIN]))
    # A replay has no engines, and so no validation.
    rows = len(stores[VALIDATION]) if VALIDATION in stores and rollout.generates else 0
    job = build_job(recipe, recorder, steps, preemption, validates=rows > 0)
    estimation = advantage_settings(algorithm)
    state = resumed.state or {"taken": 0, "kl_coefficient": algorithm.kl.coefficient, "skipped": 0}
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    limit = update_limit(rollout.update_timeout, described.parameters * dtype.itemsize)
    common: dict[str, Any] = {"start_timeout": cluster.start_timeout, "tell": recorder.console.message}
    engines = Engines(
        groups.engines,
        **common,
        check_prompts=check_prompts(stores[TRAIN]),
        timeout=limit,
        tolerance=_tolerance(recipe.model.dtype, rollout.weight_check_tolerance),
        in_flight=rollout.in_flight,
    )
    rollout_progress = RolloutProgress(recorder.console.waiting, recorder.console.message)
    queue = Replaceable(groups.queue, **common) if len(groups.queue) else None
    collector = Collector(
        engines, Replaceable(groups.rewards, **common), rollout_progress, queue, spans=job.spans
    )
    sampler = prompt_sampler(recipe, len(stores[TRAIN]), int(state["taken"]))
    greedy = "greedy_R" in estimation.estimator.needs
    maker = _maker(recipe, stores[TRAIN], collector, sampler, resumed.step, greedy)
    relays = Replaceable(groups.relays, **common)
    ahead, tell = rollout.staleness > 0, recorder.console.message
    weights = WeightSync(groups.ranks, engines, relays, groups.routes, groups.colocated, ahead, tell)
    weights.choose()
    trainer = OnlineTrainer(
        job=job,
        algorithm=algorithm,
        rollout=rollout,
        reward=reward,
        data=recipe.data,
        estimation=estimation,
        ranks=groups.ranks,
        engines=engines,
        weights=weights,
        collector=collector,
        maker=maker,
        batches=SyncBatches(maker.begin),
        schedule=_schedule(recipe, recipe.optimizer.lr, steps),
        critic_schedule=(
            _schedule(recipe, algorithm.critic.lr, steps) if isinstance(algorithm, PpoSection) else None
        ),
        progress=OnlineProgress(
            kl_controller(algorithm.kl, float(state["kl_coefficient"])),
            taken=int(state["taken"]),
            skipped=int(state["skipped"]),
        ),
        share_prompts=described.shares_prompts,
        context=recipe.device.mesh.context,
        devices=devices_of(recipe, cluster, len(groups.engines)),
        validation_rows=min(rows, recipe.data.validation_rows or rows),
        record=trajectories(recipe.output) if rollout.record else None,
        colocated=groups.colocated,
    )
    trainer.send_weights(resumed.step)
    if isinstance(maker, BatchMaker) and rollout.staleness:
        trainer.batches = AsyncBatches(
            maker.begin, rollout.staleness, job.last_step - resumed.step, engines.verifying
        )
    return trainer


def _maker(
    recipe: Recipe,
    prompts: SampleStore[Prompt],
    collector: Collector,
    sampler: Sampler,
    done: int,
    greedy: bool,
) -> Maker:
    """Engines and reward workers, or their recorded results."""
    algorithm, rollout = recipe.algorithm, recipe.rollout
    assert isinstance(algorithm, OnlineSection) and rollout is not None
    if rollout.replay is not None:
        return Replayed(
            trajectories(rollout.replay),
            prompts,
            sampler,
            done=done,
            attempts=algorithm.dynamic_sampling.max_attempts,
            n=rollout.n,
            max_prompt=recipe.data.max_length,
            max_tokens=rollout.max_tokens,
            vocabulary=vocabulary_size(read_config(model_directory(recipe.model.path))),
        )
    return BatchMaker(
        collector,
        sampler,
        rollout.n,
        Sampling(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k),
        algorithm.dynamic_sampling.max_attempts,
        greedy=greedy,
    )


def _tolerance(dtype: str, limit: float | None) -> Tolerance:
    return TOLERANCE[dtype] if limit is None else Tolerance.fixed(limit)


def devices_of(recipe: Recipe, cluster: ClusterSection, engines: int | None = None) -> int:
    """Devices of ranks, and those that engines have to themselves: throughput is divided by them."""
    return sum(demand_of(recipe, cluster, engines).bundles)


def prompt_sampler(recipe: Recipe, rows: int, taken: int) -> Sampler:
    algorithm, trainer = recipe.algorithm, recipe.trainer
    assert isinstance(algorithm, OnlineSection)
    # Where draws are replaced by others, steps and not epochs say when it is enough.
    endless = trainer.steps is not None or algorithm.dynamic_sampling.max_attempts > 0
    limit = None if endless else rows * trainer.epochs
    return Sampler(rows, recipe.data.batch_size, recipe.seed, recipe.data.shuffle, limit, taken)


def _schedule(recipe: Recipe, lr: float, steps: int) -> Schedule:
    optimizer = recipe.optimizer
    ratio, steps_given = optimizer.warmup_ratio, optimizer.warmup_steps
    return make_schedule(optimizer.schedule, lr, steps, ratio, optimizer.min_lr_ratio, steps_given)


def kl_controller(kl: KlSection, coefficient: float) -> FixedKl | AdaptiveKl:
    if kl.controller == "adaptive":
        return AdaptiveKl(coefficient, kl.target, kl.horizon)
    return FixedKl(coefficient)
