"""Train a recipe: start the ranks of a supervised run, or join those that torchrun started, and run one."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from isotrain.children import die_with_parent, module_arguments
from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.device.determinism import make_deterministic, profile
from isotrain.device.vendors import check_host_ranks
from isotrain.engine.world import STORE_VARIABLE, join_world
from isotrain.errors import DeviceError, IsotrainError, LaunchError, RankLost, may_pass
from isotrain.models.files import model_directory
from isotrain.observe.console import Console
from isotrain.observe.journal import Journal
from isotrain.observe.loggers import check_loggers
from isotrain.recipe.load import load_resolved, write_resolved
from isotrain.recipe.online import OnlineSection
from isotrain.recipe.preference import PreferenceSection
from isotrain.recipe.schema import Recipe
from isotrain.terminal import guard
from isotrain.trainers.build import build_trainer, open_loaders, place_of_reference
from isotrain.trainers.encoder import cache
from isotrain.trainers.job import Recorder
from isotrain.trainers.preemption import CLOSING_SECONDS, PREEMPTED, Preempted, Preemption, preemptible
from isotrain.trainers.preference import precompute_reference
from isotrain.trainers.start import (
    attach_probes,
    check_probe_in_run,
    describe_model,
    model_digest,
    open_run,
    record_start,
)
from isotrain.trainers.supervised import SupervisedTrainer

RECIPE_FILE = "recipe.json"
SOURCE_FILE = "recipe.yaml"
ERROR_FILE = "error-{rank}.txt"
CRASH_FILE = "crash-{rank}.txt"
PREEMPTED_FILE = "preempted"
LAUNCHER_VARIABLE = "ISOTRAIN_LAUNCHER"


def launch(recipe: Recipe, source: str, preemption: Preemption | None = None) -> None:
    """Train a recipe; `source` is its text as the user wrote it."""
    if isinstance(recipe.algorithm, OnlineSection):
        # Ray comes in only here: supervised recipes run where it is not installed.
        from isotrain.trainers.online.run import train_online

        train_online(recipe, source, preemption)
        return
    device = choose_device(recipe.device.type)
    joins = "RANK" in os.environ
    ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if joins else recipe.device.ranks
    if device.visible_devices_variable and ranks > device.count():
        raise DeviceError(
            f"device.ranks: {ranks} ranks need {ranks} devices, but {device.count()} are visible; "
            f"lower device.ranks or check {device.visible_devices_variable}"
        )
    if not device.visible_devices_variable:
        check_host_ranks(ranks)
    if joins or ranks == 1:
        os.environ.update(device.rank_environment(ranks, int(os.environ.get("WORLD_SIZE", ranks))))
        os.environ.update(profile(device, recipe.device.determinism, os.environ).variables)
        train_supervised(recipe, source, preemption)
        return
    with tempfile.TemporaryDirectory(prefix="isotrain-") as directory:
        job = Path(directory)
        write_resolved(recipe, job / RECIPE_FILE)
        (job / SOURCE_FILE).write_text(source)
        variables = {
            **device.rank_environment(ranks, ranks),
            **profile(device, recipe.device.determinism, os.environ, starts=True).variables,
            LAUNCHER_VARIABLE: str(os.getpid()),
        }
        run_ranks(module_arguments("isotrain.trainers.launch", directory), ranks, job, variables, preemption)


def train_supervised(recipe: Recipe, source: str, preemption: Preemption | None = None) -> None:
    """This rank's part of a supervised run."""
    preemption = preemption or Preemption()
    device = choose_device(recipe.device.type)
    with join_world(device, shape=recipe.device.mesh) as world:
        make_deterministic(recipe.device.determinism)
        # Ranks drop out different units; everything that must be alike is drawn from names and rows instead.
        device.seed(recipe.seed + world.rank)
        with open_run(recipe, world.size, world) as console:
            if world.is_main:
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
            console = Journal(console, run, devices=world.size) if world.is_main else console
            recorder = Recorder(console)
            trainer = build_trainer(recipe, device, world, run, loader, validation, recorder, preemption)
            check_probe_in_run(recipe, trainer.job.steps)
            console.message(_introduction(recipe, device, trainer))
            if world.is_main:
                run.add_to_start({"model": describe_model(trainer.engine.model)})
            if cached:
                _precompute_reference(recipe, trainer, data["model"], console)
            done = trainer.resume()
            attach_probes(trainer.engine, recipe, done)
            trainer.job.train(trainer, recipe, done)
            trainer.job.close(recipe.name)


def _precompute_reference(recipe: Recipe, trainer: SupervisedTrainer, model: str, console: Console) -> None:
    """Before a checkpoint is read: the model must be the one that training starts from."""
    identity = {"digest": model, "dtype": recipe.model.dtype, "perturbation": str(recipe.model.perturbation)}
    for loader, steps in ((trainer.loader, trainer.job.last_step), (trainer.validation, sys.maxsize)):
        if loader is not None:
            precompute_reference(trainer.engine, loader, identity, steps, cache("references"), console)


def _introduction(recipe: Recipe, device: Device, trainer: SupervisedTrainer) -> str:
    """A summary before the first step."""
    engine, store = trainer.engine, trainer.loader.store
    everything = sum(p.numel() for p in engine.model.parameters())
    trained = sum(p.numel() for p in engine.trained.values())
    samples = (
        f"{len(store):,} samples, {store.tokens:,} tokens, {store.meta['loss_tokens']:,} of them with loss"
    )
    if isinstance(recipe.algorithm, PreferenceSection):
        samples = f"{len(store):,} {recipe.algorithm.items}, {store.tokens:,} tokens"
    steps = f"{trainer.job.steps} step{'s' * (trainer.job.steps != 1)}"
    return (
        f"{recipe.name}: {steps} on {engine.world.size} x {device.type} ({device.name()})\n"
        f"  {trained:,} of {everything:,} parameters trained, {engine.model.attention} attention\n"
        f"  fused operators: {engine.model.fused}\n"
        f"  {samples}"
    )


def run_ranks(
    arguments: tuple[str, ...],
    ranks: int,
    job: Path,
    variables: dict[str, str],
    preemption: Preemption | None = None,
) -> None:
    """Python with these arguments once for each rank; raises what the ranks wrote to `job` when one fails."""
    shared = {
        **variables,
        STORE_VARIABLE: str(job / "store"),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        # All ranks are on this machine: their host collectives need no other interface.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    # Elastic logs failed ranks too; our messages come from the ranks themselves.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    processes = start_processes(
        name="rank",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(ranks), arguments),
        envs={rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)},
        logs_specs=DefaultLogsSpecs(log_dir=str(job)),
    )
    if preemption is not None:
        preemption.pass_on(list(processes.pids().values()))
    try:
        result = processes.wait()
    except Preempted:
        processes.close(signal.SIGKILL)
        raise
    finally:
        processes.close()
    if result is not None and result.is_failed():
        if (job / PREEMPTED_FILE).exists():
            raise Preempted
        raise _error(job, {rank: failure.exitcode for rank, failure in result.failures.items()})


def _error(job: Path, exit_codes: dict[int, int]) -> LaunchError:
    """The errors of the ranks, each once; for a rank without one, how it ended.

    When one rank stops with an error, the others' collectives break: their errors explain nothing.
    """

    def words(kind: str) -> list[str]:
        return [file.read_text().strip() for file in sorted(job.glob(kind.format(rank="*")))]

    # The first failure makes the launcher end the others with SIGTERM: that one explains nothing either.
    killed = [
        f"rank {rank} was killed by signal {-code}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
        for rank, code in sorted(exit_codes.items())
        if code < 0 and code != -signal.SIGTERM
    ]
    ended = [f"rank {rank} ended with exit code {code}" for rank, code in sorted(exit_codes.items())]
    if errors := words(ERROR_FILE):
        return LaunchError("\n".join(dict.fromkeys(errors)))
    return RankLost("\n".join(dict.fromkeys(killed or words(CRASH_FILE) or ended)))


def main(job: Path) -> int:
    """The process of one rank that `launch` started."""
    # A rank whose launcher was killed would go on writing into a run directory that is being resumed.
    die_with_parent(int(os.environ[LAUNCHER_VARIABLE]))
    rank = os.environ["RANK"]
    recipe, source = load_resolved(job / RECIPE_FILE), (job / SOURCE_FILE).read_text()
    try:
        # The launcher outlives its ranks: it tells the user how the run has ended.
        with preemptible(recipe.trainer.preemption_seconds, closing=CLOSING_SECONDS, spares=2) as preemption:
            train_supervised(recipe, source, preemption)
    except Preempted:
        (job / PREEMPTED_FILE).touch()
        return PREEMPTED
    except Exception as error:
        ours = isinstance(error, IsotrainError)
        text = str(error) if ours else f"rank {rank} failed:\n{traceback.format_exc()}"
        file = CRASH_FILE if may_pass(error) else ERROR_FILE
        (job / file.format(rank=rank)).write_text(text)
        return 1
    return 0


if __name__ == "__main__":
    guard()  # its output is the terminal of the command
    # A terminal sends Ctrl-C to every process: the launcher, which gets it too, asks the ranks to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main(Path(sys.argv[1])))
