"""A supervised run from its recipe to its last step, as one rank sees it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.device.determinism import make_deterministic, profile
from isotrain.engine.world import join_world
from isotrain.models.load import model_directory
from isotrain.observe.console import Console, open_console
from isotrain.observe.journal import Journal
from isotrain.observe.loggers import check_loggers
from isotrain.recipe.preference import PreferenceSection
from isotrain.recipe.schema import Recipe
from isotrain.trainers.build import build_trainer, place_of_reference
from isotrain.trainers.preemption import Preemption
from isotrain.trainers.recorder import Recorder, draw_plots, recording
from isotrain.trainers.setup import cache, open_loaders
from isotrain.trainers.start import (
    attach_probes,
    check_probe_in_run,
    check_run,
    describe_model,
    model_digest,
    prepare_output,
    record_start,
    run_lock,
)
from isotrain.trainers.supervised import SupervisedTrainer
from isotrain.trainers.tasks.reference import precompute_reference


def train_supervised(recipe: Recipe, source: str, preemption: Preemption | None = None) -> None:
    """This rank's part of a supervised run."""
    preemption = preemption or Preemption()
    device = choose_device(recipe.device.type)
    with join_world(device, shape=recipe.device.mesh) as world:
        make_deterministic(recipe.device.determinism)
        # Ranks drop out different units; everything that must be alike is drawn from names and rows instead.
        device.seed(recipe.seed + world.rank)
        silent = "console" not in recipe.observe.loggers
        with (
            run_lock(Path(recipe.output), world.leads),
            open_console(silent=silent, devices=world.size) if world.leads else Console() as console,
        ):
            if world.leads:
                prepare_output(recipe, console.message)
            world.barrier()  # nothing is moved any more
            check_run(recipe)
            if world.leads:
                check_loggers(recipe.observe.loggers)
            loader, validation = open_loaders(recipe, device, world, console)
            data = {"train": loader.store.digest} | (
                {"validation": validation.store.digest} if validation else {}
            )
            cached = place_of_reference(recipe) == "cached"
            if cached or recipe.observe.layer_trace or recipe.observe.model_digest:
                data["model"] = world.agree(
                    lambda: model_digest(model_directory(recipe.model.path)),
                    "model.path: the machines have different models; copy the same one to all of them",
                )
            determinism = profile(device, recipe.device.determinism, os.environ)
            for complaint in determinism.complaints:
                console.message(f"warning: device.determinism: {complaint}")
            run = record_start(recipe, source, device, world, data, determinism)
            console = Journal(console, run, devices=world.size) if world.leads else console
            recorder = Recorder(console)
            trainer = build_trainer(recipe, device, world, run, loader, validation, recorder, preemption)
            check_probe_in_run(recipe, trainer.steps)
            console.message(_introduction(recipe, device, trainer))
            if world.leads:
                run.add_to_start({"model": describe_model(trainer.engine.model)})
            if cached:
                _precompute_reference(recipe, trainer, data["model"], console)
            done = trainer.resume(run, console)
            attach_probes(trainer.engine, recipe, done)
            with recording(trainer.recorder, recipe, run, done, world.leads):
                console.start(trainer.last_step, done + 1)
                trainer.train(done)
            if world.leads:
                draw_plots(run, recipe.name, console)
                console.message(f"done: {trainer.last_step} steps in {run.path}; curves in {run.plots}")
                console.message(f"next: isotrain export {run.path} --out DIR")


def _precompute_reference(recipe: Recipe, trainer: SupervisedTrainer, model: str, console: Console) -> None:
    """Before a checkpoint is read: the model must be the one that training starts from."""
    identity = {"digest": model, "dtype": recipe.model.dtype, "perturbation": str(recipe.model.perturbation)}
    for loader, steps in ((trainer.loader, trainer.last_step), (trainer.validation, sys.maxsize)):
        if loader is not None:
            precompute_reference(trainer.engine, loader, identity, steps, cache("references"), console)


def _introduction(recipe: Recipe, device: Device, trainer: SupervisedTrainer) -> str:
    """A summary before the first step."""
    engine, store = trainer.engine, trainer.loader.store
    everything = sum(p.numel() for p in engine.model.parameters())
    trained = sum(p.numel() for p in engine.trained.values())
    told = f"{len(store):,} samples, {store.tokens:,} tokens, {store.meta['loss_tokens']:,} of them with loss"
    if isinstance(recipe.algorithm, PreferenceSection):
        told = f"{len(store):,} {recipe.algorithm.items}, {store.tokens:,} tokens"
    return (
        f"{recipe.name}: {trainer.steps} steps on {engine.world.size} x {device.type} ({device.name()})\n"
        f"  {trained:,} of {everything:,} parameters trained, {engine.model.attention} attention\n"
        f"  fused operators: {engine.model.fused}\n"
        f"  {told}"
    )
