"""Reads checkpoints: whole tensors or any rank's part of them, whatever number of ranks wrote them."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from isotrain.engine.checkpoint.layout import problem_in, rank_file, read_manifest, step_directory, steps_in
from isotrain.engine.world import World
from isotrain.errors import CheckpointError
from isotrain.files import parse_json
from isotrain.models.weights import Shard


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
    def state(self) -> Mapping[str, float]:
        """The loop's counts; a missing one is a CheckpointError."""
        return _Counts(self.manifest["state"])

    @property
    def files(self) -> list[str]:
        return sorted(self.manifest["files"])

    def problem(self, file: str) -> str | None:
        """The flaw of one of the files, if it has one."""
        return problem_in(self.directory, file, self.manifest["files"][file])

    def problems(self) -> list[str]:
        """The flaws of all files."""
        return [problem for file in self.files if (problem := self.problem(file))]

    def extras(self, rank: int) -> dict[str, Any]:
        """The JSON that one rank saved for itself."""
        return self._file(rank).extras

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All tensors and their whole shapes."""
        return {name: place.shape for name, place in self._file(0).places.items()}

    @torch.no_grad()
    def fill(self, shards: Mapping[str, Shard], rank: int) -> None:
        """Copy the saved values into local shards; a rank's own file is enough if the split is the same."""
        file = self._file(rank) if rank < self.ranks else None
        for name, shard in shards.items():
            if file is not None and file.holds(name, shard):
                shard.local.copy_(file.read(name))
                continue
            missing = shard.local.numel()
            for writer in range(self.ranks):
                missing -= self._file(writer).copy_overlap(name, shard)
            if missing:
                raise CheckpointError(
                    f"{self.directory}: the checkpoint has no '{name}' in the shape that this model needs"
                )

    def whole(self, name: str) -> torch.Tensor:
        shape = self._file(0).places[name].shape
        dtype = self._file(0).read(name).dtype
        # Before memory is taken: what the files hold bounds it, a shape written in them does not.
        if sum(self._file(writer).count(name) for writer in range(self.ranks)) != math.prod(shape):
            raise CheckpointError(f"{self.directory}: the parts of '{name}' do not add up to {shape}")
        shard = Shard(torch.empty(shape, dtype=dtype), shape, (0,) * len(shape))
        self.fill({name: shard}, rank=self.ranks)
        return shard.local

    def _file(self, rank: int) -> _RankFile:
        if rank not in self._files:
            self._files[rank] = _RankFile(self.directory / rank_file(rank))
        return self._files[rank]


class _Counts(dict[str, int]):
    def __missing__(self, name: str) -> int:
        raise CheckpointError(f"the checkpoint has no '{name}': another kind of run wrote it")


class _Extent(NamedTuple):
    """Shape of the whole, and where the part begins in it."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


class _RankFile:
    def __init__(self, path: Path) -> None:
        try:
            self._tensors = safe_open(path, "pt")
            metadata = self._tensors.metadata()
            described = dict(parse_json(metadata["shards"]))
            self.places = {name: self._place(name, where) for name, where in described.items()}
            self.extras: dict[str, Any] = parse_json(metadata["extras"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is not a rank's file of a checkpoint ({error})") from error

    def _place(self, name: str, described: dict[str, list[int]]) -> _Extent:
        shape, offset = (tuple(map(operator.index, described[key])) for key in ("shape", "offset"))
        sizes = self._tensors.get_slice(name).get_shape()
        for start, size, whole in zip(offset, sizes, shape, strict=True):
            if not 0 <= start <= start + size <= whole:
                raise ValueError(f"'{name}' lies outside of its whole")
        return _Extent(shape, offset)

    def count(self, name: str) -> int:
        """Elements of a tensor that are in this file."""
        return math.prod(self._tensors.get_slice(name).get_shape()) if name in self.places else 0

    def holds(self, name: str, shard: Shard) -> bool:
        place = self.places.get(name)
        return (
            place is not None
            and place == (shard.shape, shard.offset)
            and tuple(self._tensors.get_slice(name).get_shape()) == tuple(shard.local.shape)
        )

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors.get_tensor(name)
        return tensor

    def copy_overlap(self, name: str, shard: Shard) -> int:
        """Copy the region that this file and the shard share; returns its size."""
        place = self.places.get(name)
        if place is None or place.shape != shard.shape:
            return 0
        saved = self._tensors.get_slice(name)
        source, target, size = [], [], 1
        for saved_from, saved_size, shard_from, shard_size in zip(
            place.offset, saved.get_shape(), shard.offset, shard.local.shape, strict=True
        ):
            start = max(saved_from, shard_from)
            stop = min(saved_from + saved_size, shard_from + shard_size)
            if start >= stop:
                return 0
            source.append(slice(start - saved_from, stop - saved_from))
            target.append(slice(start - shard_from, stop - shard_from))
            size *= stop - start
        shard.local[tuple(target)] = saved[tuple(source)].to(shard.local.device)
        return size


def newest_valid(root: Path, world: World) -> tuple[CheckpointReader | None, list[str]]:
    """The newest checkpoint without a flaw, agreed on by all ranks, and why newer ones are not used.

    Each rank looks at its share of the files. The leading rank, which speaks for all, knows every reason.
    """
    complaints: list[str] = []
    for step in map(int, world.from_main(steps_in(root) if world.is_main else [])):
        directory = step_directory(root, step)
        reader, reasons = _open(directory)
        (unreadable,) = world.sum([reader is None])
        if reader is None or unreadable:
            reasons = reasons or ["another rank cannot read it"]
        else:
            share = reader.files[world.rank :: world.size]
            flawed = {file for file in share if reader.problem(file)}
            flawed_anywhere = world.sum([file in flawed for file in reader.files])
            if not any(flawed_anywhere):
                return reader, complaints
            if world.is_main:
                named = [file for file, flaws in zip(reader.files, flawed_anywhere, strict=True) if flaws]
                reasons = [reader.problem(file) or f"another rank cannot read {file}" for file in named]
        complaints += [f"checkpoint {directory.name} is not used: {reason}" for reason in reasons]
    if complaints:
        complaints.append(f"no valid checkpoint in {root}")
    return None, complaints


def _open(directory: Path) -> tuple[CheckpointReader | None, list[str]]:
    try:
        return CheckpointReader(directory), []
    except (ValueError, OSError) as error:
        return None, [str(error)]
