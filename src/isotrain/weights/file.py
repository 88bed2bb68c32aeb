"""Weights through a file in shared memory on each machine that has engines.

The first rank of a machine writes it. To machines without a rank, rank 0 broadcasts what it wrote, and a
relay there writes the file. It is in safetensors layout. It is never read while it is written, nor written
while it is read: the writer holds an exclusive lock, readers hold a shared one, and the kernel lets go of
both when a process dies.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import math
import mmap
import os
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isotrain import children
from isotrain.errors import WeightUpdateError
from isotrain.weights.devices import BroadcastTransport
from isotrain.weights.digest import HOST, TYPE_NAMES, TYPES, Contents, Digest, Weight, checksum
from isotrain.weights.update import FileSource, Routes, WeightUpdate

if TYPE_CHECKING:
    from isotrain.cluster.placement import Placement, Slot

# Two files take turns: overwriting pages that exist is almost twice as fast as asking for new ones, and the
# newest version stays readable while the next one is written.
FILES = ("weights-0.safetensors", "weights-1.safetensors")
# Where the tensors begin: the header stands first, but is known only when the last tensor has come.
HEADER_ROOM = 1 << 20
LENGTH = struct.Struct("<Q")
PREFIX = "isotrain-weights-"
# Names the run that a process belongs to: what its killed processes left is removed with it, not by others.
RUN_VARIABLE = "ISOTRAIN_RUN"


class FileTransport:
    """Works everywhere: nobody has to be ready at a certain moment, and no device to share or connect."""

    together = False

    def routes(self, placement: Placement, tensor_parallel: int) -> Routes:
        """Each engine reads the file of its machine: its first rank's, or that of a relay."""
        first, away = _first_ranks(placement), list(machines_without_ranks(placement))
        ranks = [first.get(slot.node, 0) for slot in placement.engines]
        relays = {
            number: away.index(slot.node)
            for number, slot in enumerate(placement.engines)
            if slot.node in away
        }
        readers = Counter(ranks)
        receivers = tuple(readers[rank] for rank in range(len(placement.ranks)))
        hosts = tuple(slot.host for slot in placement.ranks)
        return Routes("file", tuple((rank,) for rank in ranks), receivers, hosts, relays)

    def open(self, host: str, receivers: int, timeout: float, device: torch.device) -> FileTransport:
        return self  # nobody listens

    def announce(self, version: int, size: int, timeout: float) -> None:
        """Engines are told when it is written."""

    def send(self, tensors: Iterable[Weight], version: int) -> WeightUpdate:
        return write_update(tensors, version)

    def receive(
        self, update: WeightUpdate, engine: str, timeout: float, device: torch.device, worker: int = 0
    ) -> contextlib.AbstractContextManager[Contents]:
        return open_update(update, engine)


class Relay:
    """A worker on a machine without a rank: writes what rank 0 broadcasts for all engines of the machine."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self) -> None:
        """Nothing has to be made ready, so a relay can be replaced at any time between two updates."""

    def take(self, announced: WeightUpdate, timeout: float) -> WeightUpdate:
        with BroadcastTransport().receive(announced, self.name, timeout, HOST) as contents:
            return write_update(contents.tensors, announced.version)

    def close(self) -> None:
        remove_private_directory()


def machines_without_ranks(placement: Placement) -> dict[str, Slot]:
    """Each with the first of its engines."""
    home = _first_ranks(placement)
    return {slot.node: slot for slot in reversed(placement.engines) if slot.node not in home}


def _first_ranks(placement: Placement) -> dict[str, int]:
    return {slot.node: rank for rank, slot in reversed(list(enumerate(placement.ranks)))}


def write_update(tensors: Iterable[Weight], version: int, directory: Path | None = None) -> WeightUpdate:
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
    return WeightUpdate(version, (FileSource(str(path)),), digest.tensors, digest.bytes, digest.hex())


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory; copied only where it is elsewhere or not contiguous."""
    host = tensor.detach().to("cpu").contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().data if host.numel() else memoryview(b"")


def read_update(update: WeightUpdate, engine: str = "engine") -> Iterator[Weight]:
    """The tensors of an update, which has been verified before the first one is given out."""
    with open_update(update, engine) as contents:
        yield from contents.tensors


def path_of(update: WeightUpdate) -> str:
    source = update.source()
    assert isinstance(source, FileSource), "of an update in a file"
    return source.path


@contextlib.contextmanager
def open_update(update: WeightUpdate, engine: str) -> Iterator[Contents]:
    """Verified tensors that lie in the file itself; they must not be used after the context is left."""
    try:
        descriptor = os.open(path_of(update), os.O_RDONLY | os.O_CLOEXEC)
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
    """A tensor on the file's memory, which it keeps alive; None where the file could not hold it."""
    if dtype not in TYPES:
        return None
    try:
        if not (count := math.prod(shape)):
            return torch.empty(shape, dtype=TYPES[dtype])
        flat: torch.Tensor = torch.frombuffer(file, dtype=TYPES[dtype], count=count, offset=offset)
        return flat.view(shape)
    except (ValueError, RuntimeError, TypeError):
        return None


def _wrong(update: WeightUpdate, engine: str, what: str) -> WeightUpdateError:
    return WeightUpdateError(f"{engine}: weight update {update.version} ({update.source()}) {what}")


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
    path = children.make_held(root, PREFIX + os.environ.get(RUN_VARIABLE, ""))
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
    children.remove_abandoned(root, PREFIX + run, age)
