"""Starts a recipe's ranks through torch elastic, or joins the ranks that torchrun started."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from isotrain.device.detect import choose_device
from isotrain.device.determinism import profile
from isotrain.engine.world import STORE_VARIABLE
from isotrain.errors import DeviceError, LaunchError, RankLost
from isotrain.own_python import module_arguments
from isotrain.recipe.load import write_resolved
from isotrain.recipe.online import OnlineSection
from isotrain.recipe.schema import Recipe
from isotrain.trainers.preemption import Preempted, Preemption
from isotrain.trainers.rank import (
    CRASH_FILE,
    ERROR_FILE,
    LAUNCHER_VARIABLE,
    PREEMPTED_FILE,
    RECIPE_FILE,
    SOURCE_FILE,
)
from isotrain.trainers.run import train_supervised


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
    if joins or ranks == 1:
        os.environ.update(device.rank_environment(ranks))
        os.environ.update(profile(device, recipe.device.determinism, os.environ).variables)
        train_supervised(recipe, source, preemption)
        return
    with tempfile.TemporaryDirectory(prefix="isotrain-") as directory:
        job = Path(directory)
        write_resolved(recipe, job / RECIPE_FILE)
        (job / SOURCE_FILE).write_text(source)
        variables = {
            **device.rank_environment(ranks),
            **profile(device, recipe.device.determinism, os.environ, starts=True).variables,
            LAUNCHER_VARIABLE: str(os.getpid()),
        }
        run_ranks(module_arguments("isotrain.trainers.rank", directory), ranks, job, variables, preemption)


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
    if told := words(ERROR_FILE):
        return LaunchError("\n".join(dict.fromkeys(told)))
    return RankLost("\n".join(dict.fromkeys(killed or words(CRASH_FILE) or ended)))
