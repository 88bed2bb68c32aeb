"""Weights from one process to others on the same host, through a file in shared memory.

The file is in safetensors layout. It is never read while it is written, nor written while it is read: the
writer holds an exclusive lock, readers hold a shared one, and the kernel lets go of both when a process dies.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import math
import mmap
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isotrain import abandoned
from isotrain.errors import WeightUpdateError
from isotrain.rollout.base import WeightUpdate

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

    def add(self, name: str, dtype: str, shape: tuple[int, ...], size: int, total: int) -> None:
        """`total`: the check sum of its bytes."""
        self.tensors += 1
        self.bytes += size
        self._hash.update(f"{name}\0{dtype}\0{shape}\0{total:016x}\n".encode())

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


# Words of 8 bytes that are added up before their place counts.
_ROW = 1024
_FACTOR = 0x9E3779B97F4A7C15


def checksum(data: memoryview) -> int:
    """Of all bytes and, row by row, of their places; four times as fast as a CRC, for which memory waits.

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


def checksums(bucket: torch.Tensor, places: Sequence[tuple[int, int]]) -> list[int]:
    """Of parts of a flat tensor of bytes, given as starts and sizes; computed where the bytes are.

    Starts are multiples of 8.
    """
    if bucket.device.type == "cpu":
        view = bucket.numpy().data
        return [checksum(view[start : start + size]) for start, size in places]
    if not places:
        return []
    totals = torch.stack([_device_checksum(bucket[start : start + size]) for start, size in places]).tolist()
    return [(total + _FACTOR * size) % 2**64 for total, (_, size) in zip(totals, places, strict=True)]


def _device_checksum(part: torch.Tensor) -> torch.Tensor:
    """As `checksum`, without what the size adds; sums of 64-bit integers wrap around as on the host."""
    whole = len(part) // 8
    words = part[: 8 * whole].view(torch.int64)
    in_rows = whole // _ROW * _ROW
    tail = part[8 * whole :].long()
    shifts = torch.arange(len(tail), device=part.device) * 8
    rest = words[in_rows:].sum() + (tail << shifts).sum()
    totals = torch.cat([words[:in_rows].view(-1, _ROW).sum(1), rest[None]])
    weights = torch.arange(len(totals), device=part.device) * 2 + _WRAPPED_FACTOR
    return (totals * weights).sum()


def tensor_over(buffer: object, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor on the memory of a buffer, which it keeps alive."""
    if not (count := math.prod(shape)):
        return torch.empty(shape, dtype=TYPES[dtype])
    flat: torch.Tensor = torch.frombuffer(buffer, dtype=TYPES[dtype], count=count, offset=offset)
    return flat.view(shape)


# Two files take turns: overwriting pages that exist is almost twice as fast as asking for new ones, and the
# newest version stays readable while the next one is written.
FILES = ("weights-0.safetensors", "weights-1.safetensors")
# Where the tensors begin: the header stands first, but is known only when the last tensor has come.
HEADER_ROOM = 1 << 20
LENGTH = struct.Struct("<Q")
PREFIX = "isotrain-weights-"
# Names the run that a process belongs to: what its killed processes left is removed with it, not by others.
RUN_VARIABLE = "ISOTRAIN_RUN"


@dataclass
class Contents:
    """What an update was found to hold, not what was announced."""

    tensors: Iterable[tuple[str, torch.Tensor]]
    version: int
    digest: str
    """Where tensors come one by one, it is known when the last has come."""


def write_update(
    tensors: Iterable[tuple[str, torch.Tensor]], version: int, directory: Path | None = None
) -> WeightUpdate:
    """Write full named tensors, from any device, holding one at a time in host memory."""
    directory = directory or private_directory()
    descriptor, path = _claim(directory)
    digest, entries = Digest(), {}
    # Check sums are computed beside the copy: both let go of the interpreter's lock.
    beside = ThreadPoolExecutor(1)
    try:
        os.pwrite(descriptor, LENGTH.pack(0), 0)  # not a file of tensors until its header is written
        for name, tensor in tensors:
            start = digest.bytes
            data, dtype, shape = host_bytes(tensor), TYPE_NAMES[tensor.dtype], tuple(tensor.shape)
            total = beside.submit(checksum, data)
            _write(descriptor, data, HEADER_ROOM + start)
            digest.add(name, dtype, shape, len(data), total.result())
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, start + len(data))}
        if len(entries) != digest.tensors:
            raise WeightUpdateError(f"weight update {version}: a tensor's name appears twice")
        _write_header(descriptor, entries, version, digest.bytes)
    except OSError as error:
        raise WeightUpdateError(
            f"cannot write weight update {version} to {directory}: {error}; it must hold two copies of the "
            "model; give a container more shared memory (docker run --shm-size)"
        ) from error
    finally:
        beside.shutdown()
        # The file system's own clock can be too coarse to tell which file is the older one.
        os.utime(descriptor, ns=(time.time_ns(), time.time_ns()))
        os.close(descriptor)  # and with it the lock
    return WeightUpdate(version, str(path), digest.tensors, digest.bytes, digest.hex())


def read_update(update: WeightUpdate, engine: str = "engine") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an update, which has been verified before the first one is given out."""
    with open_update(update, engine) as contents:
        yield from contents.tensors


@contextlib.contextmanager
def open_update(update: WeightUpdate, engine: str) -> Iterator[Contents]:
    """Verified tensors that lie in the file itself; they must not be used after the context is left."""
    try:
        descriptor = os.open(update.address, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _wrong(update, engine, f"was announced but is not there: {error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _wrong(update, engine, "is being overwritten by another one") from error
        yield _verified(descriptor, update, engine)
    finally:
        os.close(descriptor)


def _verified(descriptor: int, update: WeightUpdate, engine: str) -> Contents:
    size = os.fstat(descriptor).st_size
    if size < LENGTH.size:
        raise _wrong(update, engine, f"has {size} bytes")
    # Private and writable: torch wants writable memory, and what a reader writes must not reach the others.
    file = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    (length,) = LENGTH.unpack_from(file)
    base = LENGTH.size + length
    if not 0 < length <= size - LENGTH.size:
        raise _wrong(update, engine, "was not written to the end")
    if size - base != update.bytes:
        raise _wrong(update, engine, f"has {size - base} bytes of tensors, {update.bytes} announced")
    try:
        header: dict[str, Any] = json.loads(file[LENGTH.size : base])
        version = int(header.pop("__metadata__")["version"])
        entries = [_entry(name, **entry) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _wrong(update, engine, f"has a damaged header: {error!r}") from error
    if version != update.version:
        raise _wrong(update, engine, f"was announced, but the file holds version {version}")
    digest, view, tensors = Digest(), memoryview(file), []
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        parts = (view[base + start : base + end] for _, _, _, start, end in entries)
        totals = list(pool.map(checksum, parts))
    for (name, dtype, shape, start, end), total in zip(entries, totals, strict=True):
        tensor = _tensor(file, dtype, shape, base + start)
        if tensor is None or start != digest.bytes or end - start != tensor.nbytes or end > update.bytes:
            raise _wrong(update, engine, f"has a damaged header: tensor {name!r}")
        digest.add(name, dtype, shape, end - start, total)
        tensors.append((name, tensor))
    digest.check(update, engine)
    return Contents(tensors, version, digest.hex())


def _entry(
    name: str, dtype: str, shape: list[int], data_offsets: list[int]
) -> tuple[str, str, tuple[int, ...], int, int]:
    start, end = data_offsets
    return name, str(dtype), tuple(map(int, shape)), int(start), int(end)


def _tensor(file: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor | None:
    """None where the header describes no tensor that could be in the file."""
    if dtype not in TYPES:
        return None
    try:
        return tensor_over(file, dtype, shape, offset)
    except (ValueError, RuntimeError, TypeError):
        return None


def _wrong(update: WeightUpdate, engine: str, what: str) -> WeightUpdateError:
    return WeightUpdateError(f"{engine}: weight update {update.version} ({update.address}) {what}")


def _claim(directory: Path) -> tuple[int, Path]:
    """The older of the two files, locked; a new one in its place where somebody still reads it."""
    path = min((directory / name for name in FILES), key=lambda p: p.stat().st_mtime_ns if p.exists() else -1)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            path.unlink()  # its readers keep what they have open
            descriptor = os.open(path, flags | os.O_EXCL, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise WeightUpdateError(f"cannot write a weight update to {directory}: {error}") from error
    return descriptor, path


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _write_header(descriptor: int, entries: dict[str, Any], version: int, size: int) -> None:
    text = json.dumps({"__metadata__": {"version": str(version)}, **entries}, separators=(",", ":")).encode()
    room = HEADER_ROOM
    if len(text) > room - LENGTH.size:
        room = -(-(len(text) + LENGTH.size) // HEADER_ROOM) * HEADER_ROOM
        os.ftruncate(descriptor, room + size)
        with mmap.mmap(descriptor, room + size) as file:
            file.move(room, HEADER_ROOM, size)
    os.ftruncate(descriptor, room + size)
    _write(descriptor, memoryview(text.ljust(room - LENGTH.size)), LENGTH.size)
    os.pwrite(descriptor, LENGTH.pack(room - LENGTH.size), 0)


@functools.cache
def private_directory() -> Path:
    """A directory in shared memory for this process alone, removed at its end."""
    root = Path("/dev/shm")
    root = root if os.access(root, os.W_OK) else Path(tempfile.gettempdir())
    remove_abandoned(root)
    path = abandoned.make_held(root, PREFIX + os.environ.get(RUN_VARIABLE, ""))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(path, ignore_errors=True) if os.getpid() == owner else None)
    return path


def remove_private_directory() -> None:
    """For a process that will be killed, and so never gets to the end where it would be removed."""
    if private_directory.cache_info().currsize:
        shutil.rmtree(private_directory(), ignore_errors=True)
        private_directory.cache_clear()


def remove_abandoned(root: Path, age: float = 60.0, run: str = "") -> None:
    """Remove what killed processes left, of one run or of all: shared memory outlives them."""
    abandoned.remove_abandoned(root, PREFIX + run, age)
