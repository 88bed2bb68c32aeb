"""Small checkpoints for tests, written by any number of ranks, and ranks as threads to read them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from isotrain.engine.checkpoint.layout import sha256_of, step_directory
from isotrain.engine.checkpoint.reader import newest_valid
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.engine.world import World
from isotrain.models.weights import Shard

STATE = {"taken": 24, "skipped": 0, "updates": 3}

# Rows that three ranks share unevenly, that leave ranks without any, and one of each dimension.
SHAPES = {"weights/a": (7, 5), "weights/b": (2, 3), "weights/c": (1,), "exp_avg/d": (4, 2, 3)}


@dataclass
class Meeting:
    """Where the ranks of a test, one thread each, add up their numbers."""

    ranks: int
    values: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=30)


@dataclass(frozen=True)
class ThreadWorld(World):
    meeting: Meeting

    def sum(self, values: Sequence[float]) -> list[float]:
        self.meeting.values[self.rank] = list(values)
        self.meeting.barrier.wait()
        total = [float(sum(column)) for column in zip(*self.meeting.values.values(), strict=True)]
        self.meeting.barrier.wait()
        return total


def worlds(ranks: int) -> list[World]:
    meeting = Meeting(ranks)
    mesh = cast(Any, None)
    return [ThreadWorld(rank, ranks, rank, torch.device("cpu"), mesh, meeting) for rank in range(ranks)]


def newest(root: Path) -> tuple[int | None, str]:
    """The step a single rank would resume from, and what it says."""
    reader, complaints = newest_valid(root, worlds(1)[0])
    return (reader.step if reader else None), "\n".join(complaints)


def tensors(seed: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}


def split(whole: torch.Tensor, rank: int, ranks: int) -> Shard:
    """A rank's part as FSDP cuts it: along the first dimension, the last ranks may have nothing."""
    rows = -(-len(whole) // ranks)
    start = min(rank * rows, len(whole))
    local = whole[start : start + rows]
    return Shard(local, tuple(whole.shape), (start,) + (0,) * (whole.ndim - 1))


def shards(whole: Mapping[str, torch.Tensor], rank: int = 0, ranks: int = 1) -> dict[str, Shard]:
    return {name: split(tensor, rank, ranks) for name, tensor in whole.items()}


def save(
    root: Path, step: int, whole: Mapping[str, torch.Tensor] | None = None, *, ranks: int = 1, keep: int = 3
) -> Path:
    """One checkpoint, written by all ranks."""
    whole = tensors() if whole is None else whole
    writers = [CheckpointWriter(root, rank, ranks, keep) for rank in range(ranks)]
    for rank, each in enumerate(writers):
        each.save(step, shards(whole, rank, ranks), {"rank": rank}, STATE)
    for each in writers:
        each.wait()
        assert each.failure() is None
    return step_directory(root, step)


def sign(directory: Path) -> None:
    """Makes the marker fit the manifest, as somebody who tampers with a checkpoint would."""
    (directory / "COMPLETE").write_text(sha256_of(directory / "manifest.json"))


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.glob(".writing-*")]
