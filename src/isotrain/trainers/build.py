"""Build the supervised loop of a recipe: model, task, schedule."""

from __future__ import annotations

from typing import Any

import torch

from isotrain.algorithms import SUPERVISED_LOSSES
from isotrain.algorithms.preference import PREFERENCE_LOSSES
from isotrain.algorithms.preference.metrics import pair_metrics, response_metrics, step_metrics
from isotrain.data.loader import BatchLoader
from isotrain.data.steps import single_token
from isotrain.device.base import Device
from isotrain.engine.build import (
    Load,
    build_critic,
    build_engine,
    build_reference,
    build_step_classifier,
    from_disk,
)
from isotrain.engine.checkpoint.storage import open_storage
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.schedule import make_schedule
from isotrain.engine.scores import StepScores, among_all_tokens, of_classes, of_tokens
from isotrain.engine.world import World
from isotrain.errors import RecipeError
from isotrain.models.load import load_tokenizer, model_directory
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.preference import DpoSection, KtoSection, PrmSection, RmSection
from isotrain.recipe.schema import Recipe
from isotrain.trainers.preemption import Preemption
from isotrain.trainers.recorder import Recorder
from isotrain.trainers.save_schedule import SaveSchedule
from isotrain.trainers.setup import total_steps
from isotrain.trainers.supervised import SupervisedTrainer
from isotrain.trainers.tasks.base import SftTask, Task
from isotrain.trainers.tasks.preference import DpoWork, KtoWork, PreferenceTask, PrmWork, RmWork
from isotrain.trainers.tasks.reference import Reference, beside, precomputed, without_adapters


def build_trainer(
    recipe: Recipe,
    device: Device,
    world: World,
    run: RunDirectory,
    loader: BatchLoader,
    validation: BatchLoader | None,
    recorder: Recorder,
    preemption: Preemption,
) -> SupervisedTrainer:
    model, optimizer, trainer = recipe.model, recipe.optimizer, recipe.trainer
    steps = total_steps(recipe, len(loader.store))
    peak = recipe.device.peak_tflops
    engine, task = build_task(recipe, device=device, world=world)
    return SupervisedTrainer(
        engine=engine,
        device=device,
        task=task,
        schedule=make_schedule(
            optimizer.schedule,
            optimizer.lr,
            steps,
            optimizer.warmup_ratio,
            optimizer.min_lr_ratio,
            optimizer.warmup_steps,
        ),
        loader=loader,
        validation=validation,
        writer=CheckpointWriter(
            run.checkpoints,
            world.rank,
            world.size,
            trainer.keep_checkpoints,
            open_storage(trainer.checkpoint_storage),
            run.saved,
        ),
        recorder=recorder,
        steps=steps,
        last_step=recipe.observe.last_step(steps),
        validate_every=trainer.validate_every,
        validate_first=trainer.validate_first,
        saves=SaveSchedule(trainer.save_every, steps),
        max_skipped=trainer.max_skipped_steps if trainer.non_finite == "skip" else 0,
        preemption=preemption,
        peak_flops=peak * 1e12 if peak else device.peak_flops(getattr(torch, model.dtype)),
    )


def build_task(
    recipe: Recipe, *, device: Device, world: World, load: Load = from_disk
) -> tuple[TrainingEngine, Task[Any]]:
    """The engine, with its weights loaded, and its task."""
    algorithm, model, optimizer = recipe.algorithm, recipe.model, recipe.optimizer
    common: dict[str, Any] = {"device": device, "world": world, "load": load}
    if isinstance(algorithm, RmSection):
        _no_adapters(recipe, "a reward model")
        scorer = build_critic(model, optimizer, path=None, **common)
        options = {"loss": algorithm.loss, "centre": algorithm.centre}
        return scorer, PreferenceTask(scorer, RmWork(algorithm.margins, options), pair_metrics)
    if isinstance(algorithm, PrmSection) and algorithm.head == "classifier":
        _no_adapters(recipe, "a classifier of steps")
        judge = build_step_classifier(model, optimizer, **common)
        return judge, _step_task(judge, of_classes)
    engine = build_engine(model, optimizer, seed=recipe.seed, **common)
    task: Task[Any]
    if isinstance(algorithm, DpoSection):
        reference = _reference(recipe, engine, common)
        loss = PREFERENCE_LOSSES[algorithm.loss]
        task = PreferenceTask(engine, DpoWork(loss, _dpo_options(algorithm), reference), pair_metrics)
    elif isinstance(algorithm, KtoSection):
        weights = {
            "beta": algorithm.beta,
            "desirable_weight": algorithm.desirable_weight,
            "undesirable_weight": algorithm.undesirable_weight,
        }
        reference = _reference(recipe, engine, common)
        assert reference is not None
        task = PreferenceTask(engine, KtoWork(engine, reference, weights), response_metrics)
    elif isinstance(algorithm, PrmSection):
        tokenizer = load_tokenizer(model_directory(model.path))
        bad = single_token(tokenizer, algorithm.bad_token, "algorithm.bad_token")
        good = single_token(tokenizer, algorithm.good_token, "algorithm.good_token")
        step_scores = among_all_tokens if algorithm.vocabulary == "whole" else of_tokens
        task = _step_task(engine, step_scores(bad, good))
    else:
        task = SftTask(engine, SUPERVISED_LOSSES[algorithm.name])
    return engine, task


def _step_task(engine: TrainingEngine, step_scores: StepScores) -> PreferenceTask:
    return PreferenceTask(engine, PrmWork(step_scores), step_metrics, size=lambda data: data.labels)


def _no_adapters(recipe: Recipe, what: str) -> None:
    if recipe.model.lora.rank:
        raise RecipeError(f"model.lora: {what} must train all weights; set model.lora.rank=0")


def _dpo_options(algorithm: DpoSection) -> dict[str, Any]:
    """The recipe's settings that the loss takes."""
    options: dict[str, Any] = {} if algorithm.beta is None else {"beta": algorithm.beta}
    if algorithm.loss in ("sigmoid", "simpo"):
        options["label_smoothing"] = algorithm.label_smoothing
    if algorithm.loss in ("sigmoid", "ipo"):
        options["length_averaged"] = algorithm.length_averaged
    if algorithm.loss == "simpo":
        options["margin"] = algorithm.margin
    return options


def place_of_reference(recipe: Recipe) -> str | None:
    """Where reference log-probs come from, with `auto` resolved; None for algorithms without a reference."""
    algorithm, has_adapters = recipe.algorithm, recipe.model.lora.rank > 0
    if not isinstance(algorithm, DpoSection | KtoSection):
        return None
    if isinstance(algorithm, DpoSection) and algorithm.loss not in ("sigmoid", "ipo"):
        return None
    if algorithm.reference == "adapters-off" and not has_adapters:
        raise RecipeError(
            "algorithm.reference: adapters-off needs adapters; set model.lora.rank, or use cached"
        )
    if algorithm.reference == "auto":
        return "adapters-off" if has_adapters else "cached"
    return algorithm.reference


def _reference(recipe: Recipe, engine: TrainingEngine, common: dict[str, Any]) -> Reference | None:
    match place_of_reference(recipe):
        case "adapters-off":
            return without_adapters(engine)
        case "live":
            return beside(build_reference(recipe.model, **common))
        case "cached":
            return precomputed(engine.world.device)
    return None
