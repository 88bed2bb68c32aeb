"""Writes a model's weights as published files, holding one parameter at a time in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from isotrain.engine.checkpoint.tensor_file import write_tensors
from isotrain.models.conversion import Publisher
from isotrain.models.weights import INDEX, SINGLE

Read = Callable[[str], torch.Tensor]

# What the Hub's tools ask for.
FILE_BYTES = 5_000_000_000
METADATA = {"format": "pt"}


def write_model_files(
    out: Path, publish: Publisher, described: Mapping[str, torch.Tensor], read: Read
) -> None:
    """`described` are the model's own tensors, of which only type and shape count; `read` has the values.

    One file, or several of at most `FILE_BYTES` with an index.
    """
    published = _Published(publish, described, read)
    files = _split(published.tensors)
    if len(files) == 1:
        names = [SINGLE]
    else:
        stem, suffix = SINGLE.split(".")
        names = [f"{stem}-{n + 1:05d}-of-{len(files):05d}.{suffix}" for n in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        with (out / name).open("wb") as file:
            write_tensors(file, tensors, METADATA, published.read)
    if len(files) > 1:
        index = {
            "metadata": {
                "total_parameters": publish.model.num_parameters(),
                "total_size": sum(tensor.nbytes for tensor in published.tensors.values()),
            },
            "weight_map": {
                tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors
            },
        }
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _split(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    files: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    return files


class _Published:
    """The published tensors, made from the model's own when they are read."""

    def __init__(self, publish: Publisher, described: Mapping[str, torch.Tensor], read: Read) -> None:
        self._publish, self._described, self._read = publish, described, read
        self._groups = publish.groups(described)
        self._group_of: dict[str, int] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        """On the meta device, in the order of the model's parameters."""
        for number, group in enumerate(self._groups):
            shapes = {
                name: torch.empty(described[name].shape, dtype=described[name].dtype, device="meta")
                for name in group
            }
            for name, tensor in publish.together(shapes).items():
                self.tensors[name] = tensor
                self._group_of[name] = number
        self._made: tuple[int, dict[str, torch.Tensor]] = (-1, {})

    @torch.no_grad()
    def read(self, name: str) -> torch.Tensor:
        number = self._group_of[name]
        if self._made[0] != number:
            self._made = (-1, {})  # before the next one takes memory
            own = {own: self._read(own).to(self._described[own].dtype) for own in self._groups[number]}
            self._made = (number, self._publish.together(own))
        return self._made[1][name]
