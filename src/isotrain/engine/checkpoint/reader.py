"""Reads checkpoints: whole tensors or any rank's part of them, whatever number of ranks wrote them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from isotrain.engine.checkpoint.layout import problem_in, rank_file, read_manifest, step_directory, steps_in
from isotrain.engine.world import World
from isotrain.errors import CheckpointError
from isotrain.models.shards import Shard


class CheckpointReader:
    """A committed checkpoint. Opening reads the manifest; `problems` compares the files with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        self._files: dict[int, _RankFile] = {}

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def ranks(self) -> int:
        return int(self.manifest["ranks"])

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.manifest["state"]
        return state

    def problems(self, rank: int = 0, ranks: int = 1) -> list[str]:
        """What is wrong with the files; each of `ranks` ranks looks at its share of them."""
        files = sorted(self.manifest["files"].items())[rank::ranks]
        found = (problem_in(self.directory, name, expected) for name, expected in files)
        return [problem for problem in found if problem]

    def extras(self, rank: int) -> dict[str, Any]:
        """The JSON that one rank saved for itself."""
        return self._file(rank).extras

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All tensors and their whole shapes."""
        return {name: tuple(place["shape"]) for name, place in self._file(0).places.items()}

    @torch.no_grad()
    def fill(self, shards: Mapping[str, Shard], rank: int) -> None:
        """Copy the saved values into local shards; a rank's own file is enough if the split is the same."""
        own = self._file(rank) if rank < self.ranks else None
        for name, shard in shards.items():
            if own is not None and own.holds(name, shard):
                shard.local.copy_(own.read(name))
                continue
            missing = shard.local.numel()
            for writer in range(self.ranks):
                missing -= self._file(writer).copy_overlap(name, shard)
            if missing:
                raise CheckpointError(
                    f"{self.directory}: '{name}' is not in the checkpoint as this model needs it"
                )

    def whole(self, name: str) -> torch.Tensor:
        shape = self.shapes()[name]
        first = self._file(0).read(name)
        shard = Shard(torch.empty(shape, dtype=first.dtype), shape, (0,) * len(shape))
        self.fill({name: shard}, rank=self.ranks)
        return shard.local

    def _file(self, rank: int) -> _RankFile:
        if rank not in self._files:
            self._files[rank] = _RankFile(self.directory / rank_file(rank))
        return self._files[rank]


class _RankFile:
    def __init__(self, path: Path) -> None:
        self._tensors = safe_open(path, "pt")
        metadata = self._tensors.metadata()
        self.places: dict[str, dict[str, list[int]]] = json.loads(metadata["shards"])
        self.extras: dict[str, Any] = json.loads(metadata["extras"])

    def holds(self, name: str, shard: Shard) -> bool:
        place = self.places.get(name)
        return (
            place is not None
            and tuple(place["shape"]) == shard.shape
            and tuple(place["offset"]) == shard.offset
            and tuple(self._tensors.get_slice(name).get_shape()) == tuple(shard.local.shape)
        )

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors.get_tensor(name)
        return tensor

    def copy_overlap(self, name: str, shard: Shard) -> int:
        """Copy the region that this file and the shard share; returns its size."""
        place = self.places.get(name)
        if place is None or tuple(place["shape"]) != shard.shape:
            return 0
        saved = self._tensors.get_slice(name)
        source, target, size = [], [], 1
        for saved_from, saved_size, wanted_from, wanted_size in zip(
            place["offset"], saved.get_shape(), shard.offset, shard.local.shape, strict=True
        ):
            start = max(saved_from, wanted_from)
            stop = min(saved_from + saved_size, wanted_from + wanted_size)
            if start >= stop:
                return 0
            source.append(slice(start - saved_from, stop - saved_from))
            target.append(slice(start - wanted_from, stop - wanted_from))
            size *= stop - start
        shard.local[tuple(target)] = saved[tuple(source)].to(shard.local.device)
        return size


def newest_valid(root: Path, world: World) -> tuple[CheckpointReader | None, list[str]]:
    """The newest checkpoint without a flaw, agreed on by all ranks, and what this rank found wrong."""
    complaints: list[str] = []
    for step in steps_in(root):
        directory = step_directory(root, step)
        reader = None
        try:
            reader = CheckpointReader(directory)
            found = reader.problems(world.rank, world.size)
        except (ValueError, OSError) as error:
            found = [str(error)] if world.leads else []
        complaints += [f"checkpoint {directory.name} is not used: {problem}" for problem in found]
        flaws, unreadable = world.sum([len(found), reader is None])
        if flaws == 0 and unreadable == 0:
            return reader, complaints
    return None, complaints
