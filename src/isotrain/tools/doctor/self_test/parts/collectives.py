"""Collectives between the devices of this machine, on whole numbers that every type holds exactly.

R: ranks, N: numbers of one rank.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from isotrain.children import module_arguments
from isotrain.device.detect import choose_device
from isotrain.engine.world import World, join_world
from isotrain.tools.doctor.self_test.verdicts import (
    Reporter,
    SelfTestSetting,
    StageFailed,
    argument,
    explain,
    own_setting,
    tell_progress,
)
from isotrain.trainers.launch import ERROR_FILE, run_ranks

# Sums of this many ranks are whole numbers below 256, which bfloat16 holds.
MOST_RANKS = 8
# Numbers of one rank, for up to eight ranks.
SIZES = (8, 8 * 125, 1 << 20)
TIMED_BYTES = 64 << 20
TIMED = 5
RATE_FILE = "rate.txt"


class Case(NamedTuple):
    name: str
    run: Callable[[torch.Tensor], torch.Tensor]
    """From this rank's numbers to what the collective gives it."""
    expected: Callable[[list[torch.Tensor]], torch.Tensor]
    """The same, from the numbers of all ranks."""


def main() -> None:
    setting = own_setting()
    if setting.mode.startswith("rank "):
        sys.exit(run_rank(setting, Path(setting.mode.removeprefix("rank "))))
    device, ranks = choose_device(setting.device), min(setting.devices, MOST_RANKS)
    with (
        Reporter(setting.verdicts).stage("collectives") as stage,
        tempfile.TemporaryDirectory(dir=setting.work) as job,
    ):
        passed = argument(setting, mode=f"rank {job}")
        command = module_arguments("isotrain.tools.doctor.self_test.parts.collectives", passed)
        run_ranks(command, ranks, Path(job), device.rank_environment(ranks))
        rate = float((Path(job) / RATE_FILE).read_text())
        stage.metrics["all_reduce GB/s"] = rate
        stage.result = (
            f"{len(list(cases(0, ranks)))} kinds on {ranks} ranks exact, all_reduce {rate:.2f} GB/s"
        )


def run_rank(setting: SelfTestSetting, job: Path) -> int:
    try:
        with join_world(choose_device(setting.device)) as world:
            _check_all(world)
            rate = _rate(world)
        if world.is_main:
            (job / RATE_FILE).write_text(repr(rate))
    except Exception as error:
        (job / ERROR_FILE.format(rank=os.environ["RANK"])).write_text(explain(error))
        return 1
    return 0


def _check_all(world: World) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for size in SIZES:
            count = size // world.size * world.size
            inputs = [numbers(rank, count, dtype) for rank in range(world.size)]
            for case in cases(world.rank, world.size):
                what = f"{case.name} of {count} x {str(dtype).removeprefix('torch.')}"
                tell_progress(what)
                result = case.run(inputs[world.rank].to(world.device, copy=True)).cpu()
                wrong = int((result != case.expected(inputs)).sum())
                if wrong:
                    raise StageFailed(
                        f"{what}: {wrong} of {result.numel()} results are wrong on rank {world.rank}"
                    )


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count) % 7 + 3 * rank).to(dtype)


def cases(rank: int, ranks: int) -> Iterator[Case]:
    def all_reduce(x_N: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x_N)
        return x_N

    def all_gather(x_N: torch.Tensor) -> torch.Tensor:
        all_RN = x_N.new_empty(ranks * len(x_N))
        dist.all_gather_into_tensor(all_RN, x_N)
        return all_RN

    def reduce_scatter(x_N: torch.Tensor) -> torch.Tensor:
        part = x_N.new_empty(len(x_N) // ranks)
        dist.reduce_scatter_tensor(part, x_N)
        return part

    def broadcast(x_N: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x_N, ranks - 1)
        return x_N

    def all_to_all(x_N: torch.Tensor) -> torch.Tensor:
        own_N = torch.empty_like(x_N)
        dist.all_to_all_single(own_N, x_N)
        return own_N

    def own_part(x_N: torch.Tensor) -> torch.Tensor:
        return x_N.chunk(ranks)[rank]

    yield Case("all_reduce", all_reduce, lambda inputs: torch.stack(inputs).sum(0))
    yield Case("all_gather", all_gather, torch.cat)
    yield Case("reduce_scatter", reduce_scatter, lambda inputs: own_part(torch.stack(inputs).sum(0)))
    yield Case("broadcast", broadcast, lambda inputs: inputs[-1])
    yield Case("all_to_all", all_to_all, lambda inputs: torch.cat([own_part(x_N) for x_N in inputs]))


def _rate(world: World) -> float:
    """Gigabytes of one rank's tensor that are summed in a second."""
    x_N = torch.ones(TIMED_BYTES // 4, device=world.device)
    dist.all_reduce(x_N)
    float(x_N[0])
    started = time.perf_counter()
    for _ in range(TIMED):
        dist.all_reduce(x_N)
    float(x_N[0])  # waits for the device
    return TIMED * TIMED_BYTES / (time.perf_counter() - started) / 1e9


if __name__ == "__main__":
    main()
