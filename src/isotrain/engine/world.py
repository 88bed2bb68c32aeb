"""The ranks of a job and the one device mesh they form."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from isotrain.device.base import Device

# Set by our own launcher: ranks of one machine meet in a file, so that nothing listens on a network.
STORE_VARIABLE = "ISOTRAIN_STORE"

# Long enough for the slowest rank to read its shard of a large model, short enough to end a hang.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    """Its dimension `shard` splits weights and data; sequence and tensor parallelism become further ones."""

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all: writes metrics, commits checkpoints."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums of host numbers over all ranks, in float64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def barrier(self) -> None:
        self.sum([0.0])


@contextmanager
def join_world(device: Device) -> Iterator[World]:
    """Join the job that the environment describes (as torchrun does), or form one of a single rank."""
    rank = int(os.environ.get("RANK", "0"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    place: dict[str, Any] = {}
    if STORE_VARIABLE in os.environ:
        place = {"store": FileStore(os.environ[STORE_VARIABLE], size), "rank": rank, "world_size": size}
    elif "RANK" not in os.environ:
        place = {"store": HashStore(), "rank": 0, "world_size": 1}
    torch_device = device.activate(local_rank)
    dist.init_process_group(device.collectives, timeout=COLLECTIVE_TIMEOUT, **place)
    try:
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
        yield World(rank, size, local_rank, torch_device, mesh)
    finally:
        dist.destroy_process_group()
