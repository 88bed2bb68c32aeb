"""One number for a stream of named tensors: names, types, shapes and bytes, in order."""

from __future__ import annotations

import hashlib
import zlib

import torch

from isotrain.errors import WeightUpdateError
from isotrain.rollout.update import WeightUpdate

# Names of types as safetensors has them.
TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}


class Digest:
    """Check sums of the tensors' bytes, which are fast, gathered in a SHA-256, which is short."""

    def __init__(self) -> None:
        self.tensors = 0
        self.bytes = 0
        self._hash = hashlib.sha256()

    def add(self, name: str, dtype: str, shape: tuple[int, ...], size: int, crc: int) -> None:
        self.tensors += 1
        self.bytes += size
        self._hash.update(f"{name}\0{dtype}\0{shape}\0{crc:08x}\n".encode())

    def hex(self) -> str:
        return self._hash.hexdigest()

    def check(self, update: WeightUpdate, engine: str) -> None:
        """Compare what arrived with what was announced."""
        for what, arrived, announced in (
            ("tensors", self.tensors, update.tensors),
            ("bytes", self.bytes, update.bytes),
            ("digest", self.hex(), update.digest),
        ):
            if arrived != announced:
                raise WeightUpdateError(
                    f"{engine}: weight update {update.version} is damaged: "
                    f"{what} {arrived} arrived, {announced} announced"
                )


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory; copied only where it is elsewhere or not contiguous."""
    host = tensor.detach().to("cpu").contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().data if host.numel() else memoryview(b"")


def checksum(data: memoryview) -> int:
    return zlib.crc32(data)


def tensor_over(buffer: object, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor on the memory of a buffer, which it keeps alive."""
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=TYPES[dtype])
    flat: torch.Tensor = torch.frombuffer(buffer, dtype=TYPES[dtype], count=count, offset=offset)
    return flat.view(shape)
