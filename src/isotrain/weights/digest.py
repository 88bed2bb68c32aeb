"""The contents of a weight update, and the digest that tells whether they arrived as they were sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from isotrain.errors import WeightUpdateError
from isotrain.weights.update import WeightUpdate

Weight = tuple[str, torch.Tensor]
"""A tensor under its published name."""

HOST = torch.device("cpu")


@dataclass
class Contents:
    """The tensors and digest that an update really holds, not those that were announced."""

    tensors: Iterable[Weight]
    version: int
    digest: str
    """Where tensors come one by one, it is known when the last has come."""


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
    """Check sums of bytes, which are fast, and what they are of, gathered in a SHA-256, which is short.

    Tensors in a file have a check sum each, tensors in a bucket a place each and one for all of them.
    """

    def __init__(self) -> None:
        self.tensors = 0
        self.bytes = 0
        self._hash = hashlib.sha256()

    def add(self, name: str, dtype: str, shape: tuple[int, ...], size: int, number: int) -> None:
        """`number`: the check sum of its bytes, or where they begin in the bucket."""
        self.tensors += 1
        self.bytes += size
        self._hash.update(f"{name}\0{dtype}\0{shape}\0{number:016x}\n".encode())

    def add_bucket(self, total: int) -> None:
        """The check sum of all bytes of the tensors that were added since the bucket before."""
        self._hash.update(f"{total:016x}\n".encode())

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


# Words of 8 bytes that are added up before their place counts.
_ROW = 1024
_FACTOR = 0x9E3779B97F4A7C15


def checksum(data: memoryview) -> int:
    """A sum over all bytes and, row by row, over their places; four times as fast as a CRC.

    A flipped bit changes it, and so do rows that are shifted or exchanged; it is no defence against people.
    """
    whole = len(data) // 8
    words = np.frombuffer(data, dtype=np.uint64, count=whole)
    rows = words[: whole // _ROW * _ROW].reshape(-1, _ROW)
    rest = int(np.add.reduce(words[rows.size :])) + int.from_bytes(data[8 * whole :], "little")
    totals = np.append(np.add.reduce(rows, axis=1), np.uint64(rest % 2**64))
    weights = np.arange(len(totals), dtype=np.uint64) * np.uint64(2) + np.uint64(_FACTOR)
    return (int(np.add.reduce(totals * weights)) + _FACTOR * len(data)) % 2**64


_WRAPPED_FACTOR = _FACTOR - 2**64
"""The same bits as a signed number, which torch has on every device."""

ROW_BYTES = 8 * _ROW


def bucket_checksum(bucket: torch.Tensor) -> int:
    """As `checksum`, of a flat tensor of bytes in whole rows; computed where the bytes are.

    It takes six kernels and one wait for the device, however many tensors are in the bucket. Tensors that
    begin at different rows cannot be exchanged without changing it.
    """
    if bucket.device.type == "cpu":
        return checksum(bucket.numpy().data)
    totals = bucket.view(torch.int64).view(-1, _ROW).sum(1)  # such sums wrap around as on the host
    weights = torch.arange(len(totals), device=bucket.device) * 2 + _WRAPPED_FACTOR
    return (int((totals * weights).sum()) + _FACTOR * len(bucket)) % 2**64
