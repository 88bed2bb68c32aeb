"""The supervised loop: draw, step, validate, record, save."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isotrain.data.feed import Feed, StepData
from isotrain.data.preference_loader import PreferenceLoader, PreferenceStep
from isotrain.data.store import TokenStore
from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.device.determinism import make_deterministic, profile
from isotrain.engine.checkpoint.reader import newest_valid
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.engine.engine import TrainingEngine, UpdateResult
from isotrain.engine.identity import model_digest
from isotrain.engine.layer_trace import LayerTrace
from isotrain.engine.operator_errors import operators_compared
from isotrain.engine.schedule import Schedule, make_schedule
from isotrain.engine.state import engine_shards, generator_shards, host_generators, optimizer_updates, restore
from isotrain.engine.world import World, join_world
from isotrain.errors import CheckpointError, NonFiniteError
from isotrain.models.flops import training_flops
from isotrain.models.load import model_directory
from isotrain.observe.console import Console, open_console
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.preference import PreferenceSection
from isotrain.recipe.schema import Recipe
from isotrain.trainers.recorder import Recorder, draw_plots, recording
from isotrain.trainers.setup import cache, open_feeds, total_steps
from isotrain.trainers.start import check_run, describe_model, record_start, run_lock
from isotrain.trainers.tasks.base import Task
from isotrain.trainers.tasks.build import build_task, place_of_reference
from isotrain.trainers.tasks.precompute_reference import precompute_reference


@dataclass
class SupervisedTrainer:
    engine: TrainingEngine
    device: Device
    task: Task[Any]
    schedule: Schedule
    feed: Feed | PreferenceLoader
    validation: Feed | PreferenceLoader | None
    writer: CheckpointWriter
    recorder: Recorder
    steps: int
    validate_every: int
    validate_first: bool
    save_every: int
    max_skipped: int
    """Updates that may be left out because a number was not finite."""
    peak_flops: float | None
    around_first_update: Callable[[], AbstractContextManager[None]] = nullcontext
    skipped: int = 0

    def train(self, done: int) -> None:
        """From the step after `done` to the last."""
        try:
            self._train(done)
        except KeyboardInterrupt:
            if self.engine.world.size == 1:  # otherwise the launcher, which has heard it too, ends all ranks
                self.recorder.interrupted()
                self.writer.wait()
            raise

    def _train(self, done: int) -> None:
        if done == 0 and self.validate_first and self.validation is not None:
            self.recorder.write(0, self._validate(self.validation))
        for step in range(done + 1, self.steps + 1):
            started = time.perf_counter()
            data = self.feed.next_step()
            with self.around_first_update() if step == 1 else nullcontext():
                result = self.task.update(data, self.schedule(step))
            self.device.synchronize()
            values = self._values(step, result, data, time.perf_counter() - started)
            self._count_skipped(step, result)
            if self.validation is not None and self._is_due(step, self.validate_every):
                values |= self._validate(self.validation)
            self.recorder.write(step, values)
            if self._is_due(step, self.save_every):
                self._save(step)
            if failure := self.writer.failure():
                self.recorder.console.message(f"warning: {failure}; training goes on without it")
        self.writer.wait()
        if failure := self.writer.failure():
            raise CheckpointError(failure)

    def _validate(self, feed: Feed | PreferenceLoader) -> dict[str, float]:
        return {f"val/{name}": value for name, value in self.task.evaluate(feed.one_pass()).items()}

    def _is_due(self, step: int, every: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)

    def _values(
        self, step: int, result: UpdateResult, data: StepData | PreferenceStep, seconds: float
    ) -> dict[str, float]:
        ranks = self.engine.world.size
        values = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/lr": self.schedule(step),
            "train/tokens": data.tokens,
            **{f"train/{name}": value for name, value in result.metrics.items()},
            "timing_s/step": seconds,
            "perf/throughput": data.tokens / (seconds * ranks),
            "perf/max_memory_allocated_gb": self.device.memory().peak / 2**30,
        }
        if self.peak_flops is not None:
            flops = training_flops(
                *self.engine.parameter_counts, self.engine.model.pretrained.config, data.lengths
            )
            values["perf/mfu"] = flops / (seconds * ranks * self.peak_flops)
        return values

    def _count_skipped(self, step: int, result: UpdateResult) -> None:
        if result.applied:
            return
        self.skipped += 1
        what = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}"
        if self.skipped > self.max_skipped:
            left_out = f" ({self.skipped} updates left out)" if self.max_skipped else ""
            raise NonFiniteError(
                f"{what}: not finite{left_out}; lower optimizer.lr, look at this step's samples, "
                "or set trainer.non_finite=skip and trainer.max_skipped_steps"
            )
        self.recorder.console.message(f"warning: {what}: not finite, update left out")

    def _save(self, step: int) -> None:
        self.recorder.sync()
        state = {
            "taken": self.feed.sampler.taken,
            "skipped": self.skipped,
            "updates": optimizer_updates(self.engine),
        }
        shards = engine_shards(self.engine) | generator_shards(self.device)
        self.writer.save(step, shards, host_generators(), state)

    def resume(self, root: Path, console: Console) -> int:
        """Go on from the newest valid checkpoint, if there is one; returns the steps done."""
        reader, complaints = newest_valid(root, self.engine.world)
        for complaint in complaints:
            console.message(f"warning: {complaint}")
        if reader is None:
            return 0
        restore(self.engine, self.device, reader)
        self.feed.sampler.taken = int(reader.state["taken"])
        self.skipped = int(reader.state["skipped"])
        console.message(f"resuming after step {reader.step} of {self.steps}")
        return reader.step


def train_supervised(recipe: Recipe, source: str) -> None:
    """This rank's part of a supervised run."""
    device = choose_device(recipe.device.type)
    with join_world(device) as world:
        make_deterministic(recipe.device.determinism)
        # Ranks drop out different units; everything that must be alike is drawn from names and rows instead.
        device.seed(recipe.seed + world.rank)
        silent = "console" not in recipe.observe.loggers
        with (
            run_lock(Path(recipe.output), world.leads),
            open_console(silent=silent, devices=world.size) if world.leads else Console() as console,
        ):
            check_run(recipe)
            feed, validation = open_feeds(recipe, device, world, console)
            data = {"train": feed.store.digest} | (
                {"validation": validation.store.digest} if validation else {}
            )
            if place_of_reference(recipe) == "cached":
                data["model"] = world.agree(
                    lambda: model_digest(model_directory(recipe.model.path)),
                    "model.path: the machines have different models there; copy one to all of them",
                )
            determinism = profile(device, recipe.device.determinism, os.environ)
            for complaint in determinism.complaints:
                console.message(f"warning: device.determinism: {complaint}")
            run = record_start(recipe, source, device, world, data, determinism)
            trainer = _build_trainer(recipe, device, world, run, feed, validation, Recorder(console))
            console.message(_introduction(recipe, device, trainer))
            if world.leads:
                run.add_to_start({"model": describe_model(trainer.engine.model)})
            if "model" in data:
                _precompute_reference(recipe, trainer, data["model"], console)
            done = trainer.resume(run.checkpoints, console)
            if done == 0:
                LayerTrace(trainer.engine, run.layer_trace, recipe.observe.layer_trace)
            with recording(trainer.recorder, recipe, run, done, world.leads):
                console.start(trainer.steps, done + 1)
                trainer.train(done)
            if world.leads:
                draw_plots(run, recipe.name, console)
                console.message(f"done: {trainer.steps} steps in {run.path}; curves in {run.plots}")
                console.message(f"next: isotrain export {run.path} --out DIR")


def _build_trainer(
    recipe: Recipe,
    device: Device,
    world: World,
    run: RunDirectory,
    feed: Feed | PreferenceLoader,
    validation: Feed | PreferenceLoader | None,
    recorder: Recorder,
) -> SupervisedTrainer:
    model, optimizer, trainer = recipe.model, recipe.optimizer, recipe.trainer
    steps = total_steps(recipe, len(feed.store))
    peak = recipe.device.peak_tflops
    engine, task = build_task(recipe, device=device, world=world)
    return SupervisedTrainer(
        engine=engine,
        device=device,
        task=task,
        schedule=make_schedule(
            optimizer.schedule, optimizer.lr, steps, optimizer.warmup_ratio, optimizer.min_lr_ratio
        ),
        feed=feed,
        validation=validation,
        writer=CheckpointWriter(run.checkpoints, world.rank, world.size, trainer.keep_checkpoints),
        recorder=recorder,
        steps=steps,
        validate_every=trainer.validate_every,
        validate_first=trainer.validate_first,
        save_every=trainer.save_every,
        max_skipped=trainer.max_skipped_steps if trainer.non_finite == "skip" else 0,
        peak_flops=peak * 1e12 if peak else device.peak_flops(getattr(torch, model.dtype)),
        around_first_update=(
            partial(operators_compared, run.path, world, model.dtype)
            if recipe.observe.operators
            else nullcontext
        ),
    )


def _precompute_reference(recipe: Recipe, trainer: SupervisedTrainer, model: str, console: Console) -> None:
    """Before a checkpoint is read: the model must be the one that training starts from."""
    identity = {"digest": model, "dtype": recipe.model.dtype, "perturbation": str(recipe.model.perturbation)}
    for feed, steps in ((trainer.feed, trainer.steps), (trainer.validation, sys.maxsize)):
        if isinstance(feed, PreferenceLoader):
            precompute_reference(trainer.engine, feed, identity, steps, cache("references"), console)


def _introduction(recipe: Recipe, device: Device, trainer: SupervisedTrainer) -> str:
    """What is about to happen, before the first step has taken its time."""
    engine, store = trainer.engine, trainer.feed.store
    everything = sum(p.numel() for p in engine.model.parameters())
    trained = sum(p.numel() for p in engine.trained.values())
    told = f"{len(store):,} samples, {store.tokens:,} tokens"
    if isinstance(store, TokenStore):
        told += f", {store.loss_tokens:,} of them with loss"
    elif isinstance(recipe.algorithm, PreferenceSection):
        told = f"{len(store):,} {recipe.algorithm.items}, {store.tokens:,} tokens"
    return (
        f"{recipe.name}: {trainer.steps} steps on {engine.world.size} x {device.type} ({device.name()})\n"
        f"  {trained:,} of {everything:,} parameters trained, {engine.model.attention} attention\n"
        f"  fused operators: {engine.model.fused}\n"
        f"  {told}"
    )
