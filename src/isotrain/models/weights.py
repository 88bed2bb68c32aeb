"""Read the safetensors files of a model directory: each rank its own part, or one tensor at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from transformers import PreTrainedModel

from isotrain.errors import ModelError
from isotrain.files import parse_json, read_regular
from isotrain.models.conversion import Conversion, conversions

# Of `read_ahead`: reads at a time, bytes of each, and what is rather read than left out between two.
READERS, BLOCK_BYTES, GAP_BYTES = 8, 8 << 20, 64 << 10


@dataclass(frozen=True)
class Shard:
    local: torch.Tensor
    """This rank's part; it shares memory with the parameter."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Where the part begins in the whole, one number per dimension."""

    def part(self) -> tuple[slice, ...]:
        """The part as slices of the whole."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offset, self.local.shape, strict=True)
        )


def shard_of(tensor: torch.Tensor) -> Shard:
    if not isinstance(tensor, DTensor):
        return Shard(tensor, tuple(tensor.shape), (0,) * tensor.ndim)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Shard(tensor.to_local(), tuple(tensor.shape), tuple(offset))


def parts_of(tensor: torch.Tensor, ranks: Iterable[int]) -> Iterator[tuple[slice, ...]]:
    """The parts of a tensor that ranks of the job hold, once each."""
    if not isinstance(tensor, DTensor):
        yield shard_of(tensor).part()
        return
    mesh, parts = tensor.device_mesh, set()
    for rank in ranks:
        places = (mesh.mesh == rank).nonzero().tolist()
        for coordinate in places:
            sizes, offset = _compute_local_shape_and_global_offset(
                tensor.shape, mesh.shape, coordinate, tensor.placements
            )
            parts.add(tuple((start, start + size) for start, size in zip(offset, sizes, strict=True)))
    for part in sorted(parts):
        yield tuple(slice(start, stop) for start, stop in part)


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class WeightFiles:
    """The safetensors files of a model directory, read slice by slice."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, Any] = {}
        self._offsets: dict[str, dict[str, tuple[int, int]]] = {}
        self.file_of = self._index()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        tensor: torch.Tensor = self._slice(name)[part]
        return tensor

    def whole(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._slice(name)[...]
        return tensor

    def described(self, name: str) -> torch.Tensor:
        """Its shape, without reading it."""
        return torch.empty(self.shape(name), device="meta")

    def read_ahead(self, parts: Iterable[tuple[str, tuple[slice, ...]]]) -> int:
        """Bring parts of tensors into the system's page cache, in large reads in the order of the files.

        Ranks of this machine then find there what each would fetch in small reads, one for each tensor: from
        shared storage these take minutes. Returns the bytes; 0 if they would fill half of the free memory.
        """
        ranges = self._ranges(parts)
        total = sum(stop - start for spans in ranges.values() for start, stop in spans)
        if total > _available_memory() / 2:
            return 0
        blocks = [
            (name, start, min(BLOCK_BYTES, stop - start))
            for name, spans in ranges.items()
            for begin, stop in spans
            for start in range(begin, stop, BLOCK_BYTES)
        ]
        with ExitStack() as stack, ThreadPoolExecutor(READERS) as readers:
            opened = {name: stack.enter_context(open(self.directory / name, "rb")) for name in ranges}
            return sum(readers.map(lambda b: len(os.pread(opened[b[0]].fileno(), b[2], b[1])), blocks))

    def _ranges(self, parts: Iterable[tuple[str, tuple[slice, ...]]]) -> dict[str, list[tuple[int, int]]]:
        """Places of parts in each file, joined where little is between them."""
        spans: dict[str, list[tuple[int, int]]] = {}
        for name, part in parts:
            if any(piece.stop is not None and piece.stop <= (piece.start or 0) for piece in part):
                continue
            file_name = self.file_of[name]
            shape, (begin, end) = self.shape(name), self._places(file_name)[name]
            rows = part[0].indices(shape[0])[:2] if part else (0, 1)
            row_bytes = (end - begin) // max(1, shape[0] if part else 1)
            spans.setdefault(file_name, []).append((begin + rows[0] * row_bytes, begin + rows[1] * row_bytes))
        return {file_name: _joined(spans[file_name]) for file_name in sorted(spans)}

    def _places(self, file_name: str) -> dict[str, tuple[int, int]]:
        """Where each tensor begins and ends in a file, which safetensors has found sound."""
        if file_name not in self._offsets:
            self._file(file_name)
            with open(self.directory / file_name, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = parse_json(file.read(length))
            header.pop("__metadata__", None)
            self._offsets[file_name] = {
                name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
                for name, entry in header.items()
            }
        return self._offsets[file_name]

    def _index(self) -> dict[str, str]:
        index = self.directory / INDEX
        if index.is_file():
            try:
                weight_map = parse_json(read_regular(index))["weight_map"]
                return {str(name): str(file) for name, file in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(f"{index} is not a weight index ({error})") from error
        if (self.directory / SINGLE).is_file():
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        raise ModelError(
            f"{self.directory} has no {SINGLE}; convert the weights to safetensors (pickles are never loaded)"
        )

    def _slice(self, name: str) -> Any:
        try:
            return self._file(self.file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise ModelError(f"{self.directory}/{self.file_of[name]}: '{name}': {error}") from error

    def _file(self, file_name: str) -> Any:
        if Path(file_name).name != file_name:
            raise ModelError(
                f"{self.directory}: the weight index points outside the directory ('{file_name}')"
            )
        if file_name not in self._open:
            try:
                self._open[file_name] = safe_open(self.directory / file_name, "pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{self.directory}/{file_name} cannot be read: {error}") from error
        return self._open[file_name]


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1] + GAP_BYTES:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _available_memory() -> int:
    """Bytes that Linux would give away, page cache among them; 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)


def source_parts(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], files: WeightFiles, ranks: Sequence[int]
) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """The parts of published tensors that `load_weights` reads on these ranks."""
    for conversion in conversions(model, tensors, files.file_of):
        names = [name for pattern in conversion.sources.values() for name in pattern]
        tensor = tensors[conversion.target]
        if conversion.converter is None:
            yield from ((names[0], part) for part in parts_of(tensor, ranks))
        elif conversion.stacks and conversion.stacked == tensor.shape[0]:
            for part in parts_of(tensor, ranks):
                yield from conversion.parts(part, files.shape).items()
        else:
            yield from ((name, (slice(None),)) for name in names)


@torch.no_grad()
def load_weights(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], files: WeightFiles) -> None:
    """Fill each tensor's local shard; `tensors` are some of the model's, by their Hugging Face names.

    A fused parameter is put together by transformers' own conversion, one at a time. Of stacked experts, a
    rank reads its own only, or its part of each.
    """
    missing = set(tensors)
    for conversion in conversions(model, tensors, files.file_of):
        for name, shape in _fill(model, conversion, tensors, files).items():
            expected = shard_of(tensors[name]).shape
            if shape != expected:
                raise ModelError(
                    f"{files.directory}: '{name}' has shape {shape}, config.json says {expected}"
                )
            missing.discard(name)
    # A buffer that the files do not have keeps its first value, as it does in transformers.
    missing = {name for name in missing if isinstance(tensors[name], nn.Parameter)}
    if missing:
        raise ModelError(
            f"{files.directory} has no weights for '{min(missing)}'; set a causal language model"
        )


def _fill(
    model: PreTrainedModel, conversion: Conversion, tensors: Mapping[str, torch.Tensor], files: WeightFiles
) -> dict[str, tuple[int, ...]]:
    """Copies what fits; returns the shape that each whole tensor has in the files."""
    shard = shard_of(tensors[conversion.target])
    if conversion.converter is None:
        ((name, *_),) = conversion.sources.values()
        if files.shape(name) == shard.shape:
            shard.local.copy_(files.read(name, shard.part()))
        return {conversion.target: files.shape(name)}
    if conversion.stacks and conversion.stacked == shard.shape[0]:
        if not shard.local.numel():
            return {conversion.target: shard.shape}
        stacked = shard.part()[0]
        described = conversion.convert(model, files.described, stacked)[conversion.target]
        shape = (conversion.stacked, *described.shape[1:])
        if shape == shard.shape:
            parts = conversion.parts(shard.part(), files.shape)
            converted = conversion.convert(model, lambda name: files.read(name, parts[name]), stacked)
            shard.local.copy_(converted[conversion.target])
        return {conversion.target: shape}
    shapes = {}
    for name, made in conversion.convert(model, files.whole).items():
        if name in tensors:
            shard = shard_of(tensors[name])
            shapes[name] = tuple(made.shape)
            if shapes[name] == shard.shape:
                shard.local.copy_(made[shard.part()])
    return shapes


# Of float32, which trained weights are kept in. Narrower arithmetic makes noise of its own size from it, as
# large as other kernels make: benchmarks/README.md.
EPS = torch.finfo(torch.float32).eps


@torch.no_grad()
def perturb(parameters: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Multiply every weight by `1 + eps` or `1 - eps`, drawn on the host from seed and name.

    Neither the number of ranks nor the device changes the numbers.
    """
    for name, parameter in parameters:
        shard = shard_of(parameter)
        digest = hashlib.sha256(f"perturbation/{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        up = torch.randint(0, 2, shard.shape, generator=generator, dtype=torch.int8)[shard.part()]
        factor = 1.0 + EPS * (2.0 * up.double() - 1.0)
        shard.local.copy_((shard.local.cpu().double() * factor).to(shard.local.dtype))


class BaseWeights:
    """The tensors `names` of a model, as far as the files of its directory have them."""

    def __init__(self, model: PreTrainedModel, names: Iterable[str], directory: Path) -> None:
        self._model = model
        self._files = WeightFiles(directory)
        self._made_by: dict[str, Conversion] = {}
        for conversion in conversions(model, names, self._files.file_of):
            for name in self._targets(conversion):
                self._made_by[name] = conversion

    def __contains__(self, name: str) -> bool:
        return name in self._made_by

    def read(self, name: str) -> torch.Tensor:
        """In the type of the files; it may be the file's own memory, so it must not be changed."""
        if name not in self._made_by:
            raise ModelError(f"{self._files.directory} has no weights for '{name}'")
        return self._made_by[name].convert(self._model, self._files.whole)[name]

    def _targets(self, conversion: Conversion) -> list[str]:
        if conversion.converter is None or len(conversion.converter.target_patterns) == 1:
            return [conversion.target]
        # Which parameters come of it is found out without reading anything.
        return list(conversion.convert(self._model, self._files.described))
