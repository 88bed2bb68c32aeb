"""Build from a recipe: its data, and the supervised loop with model, task and schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isotrain.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    pair_metrics,
    response_metrics,
    step_metrics,
)
from isotrain.algorithms.sft import SUPERVISED_LOSSES
from isotrain.data.encode import Prompt
from isotrain.data.items import PICTURE_ROWS, Item
from isotrain.data.loader import BatchLoader, Sampler
from isotrain.data.preference import single_token
from isotrain.data.store import SampleStore
from isotrain.data.tokenise import RowEncoder, cached_store
from isotrain.device.base import Device
from isotrain.engine.build import (
    Load,
    build_critic,
    build_engine,
    build_reference,
    build_step_classifier,
    choose_attention,
    from_disk,
)
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.optimizer import make_schedule
from isotrain.engine.scores import StepScores, among_all_tokens, of_classes, of_tokens
from isotrain.engine.world import World
from isotrain.errors import DataError, RecipeError
from isotrain.models.attention import shares_prompts
from isotrain.models.files import load_tokenizer, model_directory
from isotrain.observe.console import Console
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.data import DataSection
from isotrain.recipe.preference import DpoSection, KtoSection, PreferenceSection, PrmSection, RmSection
from isotrain.recipe.schema import Recipe
from isotrain.trainers.encoder import cache, preference_encoder, prompt_encoder, sample_encoder
from isotrain.trainers.job import RankCheckpoints, Recorder, build_job
from isotrain.trainers.preemption import Preemption
from isotrain.trainers.preference import (
    DpoWork,
    KtoWork,
    PreferenceTask,
    PrmWork,
    Reference,
    RmWork,
    beside,
    precomputed,
    without_adapters,
)
from isotrain.trainers.profiling import RankProfile
from isotrain.trainers.supervised import SftTask, SupervisedTrainer, Task

TRAIN, VALIDATION = "train", "validation"


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
    model, optimizer = recipe.model, recipe.optimizer
    steps = total_steps(recipe, len(loader.store))
    peak = recipe.device.peak_tflops
    engine, task = build_task(recipe, device=device, world=world)
    validates = validation is not None
    job = build_job(recipe, recorder, steps, preemption, validates=validates, world=world)
    return SupervisedTrainer(
        job=job,
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
        checkpoints=RankCheckpoints.open(run, recipe.trainer, device, {"": engine}, job.spans),
        profile=RankProfile(job.spans, run, device, world.rank, recipe.observe.profile.trace),
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


def open_loaders(
    recipe: Recipe, device: Device, world: World, console: Console
) -> tuple[BatchLoader, BatchLoader | None]:
    """Training and validation micro-batches; each data set is tokenised once and cached."""
    data = recipe.data
    train = _open_store(recipe, "train", data.train, world, console)
    check_pictures(train, data.image_key)
    if warning := repetition_warning(data, len(train)):
        console.message(f"warning: {warning}")
    limit = None if recipe.trainer.steps else len(train) * recipe.trainer.epochs
    loader = _loader(
        recipe, train, Sampler(len(train), data.batch_size, recipe.seed, data.shuffle, limit), device, world
    )
    if not data.validation:
        return loader, None
    validation = _open_store(recipe, "validation", data.validation, world, console)
    rows = min(len(validation), data.validation_rows or len(validation))
    in_order = Sampler(rows, data.batch_size, recipe.seed, shuffle=False, limit=rows)
    return loader, _loader(recipe, validation, in_order, device, world)


def _loader(
    recipe: Recipe, store: SampleStore[Item], sampler: Sampler, device: Device, world: World
) -> BatchLoader:
    data = recipe.data
    return BatchLoader(
        store,
        sampler,
        data.tokens_per_micro_batch,
        world.data_rank,
        world.data_ranks,
        share_prompts=_pairs_share_prompts(recipe, device),
        longest=data.max_length if isinstance(recipe.algorithm, KtoSection) else None,
    )


def _pairs_share_prompts(recipe: Recipe, device: Device) -> bool:
    """Whether both samples of a pair can store their prompt once."""
    if not isinstance(recipe.algorithm, DpoSection | RmSection):
        return False
    return shares_prompts(
        choose_attention(model_directory(recipe.model.path), recipe.model, device, recipe.device.mesh.context)
    )


def _open_store(
    recipe: Recipe, name: str, source: str | list[str], world: World, console: Console
) -> SampleStore[Item]:
    """The store of a source of rows, encoded as the algorithm learns from them."""
    data, algorithm = recipe.data, recipe.algorithm
    tokenizer = load_tokenizer(model_directory(recipe.model.path))
    encoder: RowEncoder[Item] = (
        preference_encoder(tokenizer, data, algorithm)
        if isinstance(algorithm, PreferenceSection)
        else sample_encoder(tokenizer, recipe)
    )
    # One rank of a machine builds the store while its others wait; then all map the same files.
    return world.machine_first(
        f"data.{name}", lambda: cached_store(source, encoder, cache("tokens"), console.message)
    )


def check_pictures(store: SampleStore[Any], key: str | None) -> None:
    """A misspelt column would train without pictures, and without a word."""
    if key and not store.meta[PICTURE_ROWS.count]:
        raise DataError(
            f"data.image_key: no row of data.train has a picture in '{key}'; write the name of the column "
            "that has them, or remove image_key"
        )


def repetition_warning(data: DataSection, rows: int) -> str:
    """A warning if a batch is larger than the data, else empty."""
    if data.batch_size <= rows:
        return ""
    return (
        f"data.batch_size ({data.batch_size:,}) is above the {rows:,} rows of data.train: each step has "
        f"every row {data.batch_size / rows:.3g} times on average"
    )


def total_steps(recipe: Recipe, rows: int) -> int:
    return recipe.trainer.steps or -(-rows * recipe.trainer.epochs // recipe.data.batch_size)


def open_prompts(recipe: Recipe, tell: Callable[[str], None] | None = None) -> dict[str, SampleStore[Prompt]]:
    """Training and, where the recipe has them, validation prompts; tokenised by whoever comes first."""
    data = recipe.data
    tokenizer = load_tokenizer(model_directory(recipe.model.path))
    encoder = prompt_encoder(tokenizer, recipe)
    sources = {TRAIN: data.train} | ({VALIDATION: data.validation} if data.validation else {})
    stores = {name: cached_store(source, encoder, cache("tokens"), tell) for name, source in sources.items()}
    check_pictures(stores[TRAIN], data.image_key)
    return stores
