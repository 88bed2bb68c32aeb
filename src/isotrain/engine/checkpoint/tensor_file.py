"""Writes safetensors files in one pass: tensor by tensor, hashed on the way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
# The tensors' bytes begin at a multiple of this, and wider types come first: all of them are aligned.
_ALIGNMENT = 8
# A block is hashed right after it was written, while it is still in the processor's cache.
_BLOCK = 1 << 20


class ByteSink(Protocol):
    """A binary file, local or not, which takes all of what it is given."""

    def write(self, data: memoryview, /) -> object: ...


@dataclass(frozen=True)
class Written:
    """Size and SHA-256 of a file, as its writer knows them."""

    size: int
    sha256: str

    def report(self) -> dict[str, int | str]:
        return asdict(self)


def write_tensors(
    sink: ByteSink,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    read: Callable[[str], torch.Tensor] | None = None,
) -> Written:
    """All tensors in the given order, wider types first.

    With `read`, those given may be on the meta device, and each is read when its turn comes.
    """
    read = read or tensors.__getitem__
    # The sort is stable: tensors of one type keep their order.
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    hashed = _Hashed(sink)
    header = _header({name: tensors[name] for name in order}, metadata)
    hashed.write(memoryview(len(header).to_bytes(8, "little") + header))
    for name in order:
        described, tensor = tensors[name], read(name)
        if (tensor.dtype, tensor.shape) != (described.dtype, described.shape):
            raise ValueError(
                f"'{name}' is {tensor.dtype} {tuple(tensor.shape)}, "
                f"announced were {described.dtype} {tuple(described.shape)}"
            )
        hashed.write(_bytes_of(tensor))
    return Written(hashed.size, hashed.digest.hexdigest())


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        described[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    header = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    return header + b" " * (-len(header) % _ALIGNMENT)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # Flat first: a tensor without dimensions cannot be viewed as another type.
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class _Hashed:
    def __init__(self, sink: ByteSink) -> None:
        self.sink = sink
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data: memoryview) -> None:
        for start in range(0, len(data), _BLOCK):
            block = data[start : start + _BLOCK]
            self.sink.write(block)
            self.digest.update(block)
        self.size += len(data)
