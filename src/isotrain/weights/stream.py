"""Weights from one process to many that take them at the same time, bucket by bucket.

The store listens on an address that the caller names, never on all of them, and each update has a group of
its own: one that failed leaves nothing behind for the next. Metadata goes through host memory; the bytes of a
bucket go the way that the transport's carrier has.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed

from isotrain.children import in_background
from isotrain.device.exchange import CONNECT_ON_DEMAND
from isotrain.errors import WeightUpdateError
from isotrain.weights.digest import (
    HOST,
    ROW_BYTES,
    TYPE_NAMES,
    TYPES,
    Contents,
    Digest,
    Weight,
    bucket_checksum,
)
from isotrain.weights.update import StoreSource, WeightUpdate

c10d: Any = torch.distributed  # its types leave out what is used here

# In a bucket each tensor begins at a multiple of this: any type can be read in place, and the check sum of
# the bucket tells tensors apart, as it weighs rows of so many bytes by their places.
ALIGNMENT = ROW_BYTES


# Seconds to reach a sender that listens.
REACH = 10.0
# In the store of an attempt: why nobody needs to wait for it any more; empty after a good end.
ENDED = "ended"
# Seconds between two looks at it.
LOOK = 0.1


class Deadline:
    """One end for all the waiting of an update."""

    def __init__(self, seconds: float, attempt: Any = None) -> None:
        """`attempt`: the store of the attempt, in which it can be given up."""
        self.seconds, self.attempt = seconds, attempt
        self._end = time.monotonic() + seconds
        self._looked = 0.0

    def left(self) -> timedelta:
        return timedelta(seconds=max(0.05, self._end - time.monotonic()))

    def over(self) -> str:
        """How it has ended, as the end of a sentence; empty before that."""
        now = time.monotonic()
        if now > self._end:
            return f"within {self.seconds:g} s"
        if self.attempt is None or now < self._looked + LOOK:
            return ""
        self._looked = now
        if not self.attempt.check([ENDED]):
            return ""
        return f"before it was given up: {self.attempt.get(ENDED).decode()}"


class Control:
    """The processes of one attempt to send weights: the sender is rank 0. Host tensors only, and small."""

    def __init__(self, store: Any, host: str, rank: int, size: int, deadline: Deadline) -> None:
        """`host`: the address of this process that the others reach; nothing listens on another."""
        self.store, self.rank, self.size, self.deadline = store, rank, size, deadline
        options = c10d.ProcessGroupGloo._Options()
        # Said by both sides: a group in which only some connect on demand crashes, and training ranks of
        # large jobs do so by a variable of theirs.
        lazy = size >= CONNECT_ON_DEMAND
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host, lazy_init=lazy)]
        options._timeout = deadline.left()
        self._group = c10d.ProcessGroupGloo(c10d.PrefixStore("control", store), rank, size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast([tensor], from_sender(self.deadline)).wait(self.deadline.left())

    def meet(self) -> None:
        """Until all are here."""
        options = c10d.BarrierOptions()
        options.timeout = self.deadline.left()
        self._group.barrier(options).wait(self.deadline.left())


class Carrier(Protocol):
    bucket_bytes: int

    def buffer(self, size: int) -> torch.Tensor:
        """For the sender: bytes to be filled; those of the bucket before may be the same."""

    def describe(self) -> dict[str, Any]:
        """Plain values from which receivers take a bucket out of the filled buffer."""

    def send(self, bucket: torch.Tensor) -> None:
        """Returns when all receivers have taken it, or never will."""

    def receive(self, size: int, described: dict[str, Any]) -> torch.Tensor:
        """Bytes that are the receiver's own, as long as it wants them."""

    def close(self) -> None:
        """Let go of everything that both sides share."""


def from_sender(deadline: Deadline, beyond: timedelta = timedelta()) -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank = 0
    options.timeout = deadline.left() + beyond
    return options


class Entry(NamedTuple):
    """One tensor in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


class StreamTransport(ABC):
    """Base of transports whose receivers take the weights while they are sent."""

    name: str
    together = True

    @abstractmethod
    def open_carrier(self, control: Control, device: torch.device, expected: int) -> Carrier:
        """On both sides, for one attempt; `expected` is about how many bytes the sender will send."""

    def open(self, host: str, receivers: int, timeout: float, device: torch.device) -> StreamSender:
        return StreamSender(self, host, receivers, timeout, device)

    @contextlib.contextmanager
    def receive(
        self, update: WeightUpdate, engine: str, timeout: float, device: torch.device, worker: int = 0
    ) -> Iterator[Contents]:
        """Tensors as they arrive; whether they were whole is known, and raised, only at the end."""
        source = update.source(worker)
        assert isinstance(source, StoreSource), "of an update that is sent"
        contents = Contents(iter(()), update.version, "")

        def arriving() -> Generator[Weight]:
            try:
                yield from self._arriving(update, source, engine, timeout, device, contents)
            except WeightUpdateError:
                raise
            except RuntimeError as error:
                raise WeightUpdateError(
                    f"{engine}: weight update {update.version} did not arrive from {source} "
                    f"within {timeout:g} s: {error}"
                ) from error

        contents.tensors = tensors = arriving()
        try:
            yield contents
        finally:
            tensors.close()  # and with it all connections: the sender learns that this receiver has given up

    def _arriving(
        self,
        update: WeightUpdate,
        source: StoreSource,
        engine: str,
        timeout: float,
        device: torch.device,
        contents: Contents,
    ) -> Iterator[Weight]:
        deadline = Deadline(timeout)
        root = c10d.TCPStore(
            source.host, source.port, is_master=False, wait_for_workers=False, timeout=deadline.left()
        )
        plan = json.loads(root.get("plan"))
        if plan["version"] != update.version:
            raise WeightUpdateError(
                f"{engine}: weight update {update.version} was announced, {source} has {plan['version']}"
            )
        store = deadline.attempt = _attempt(root, plan)
        rank = store.add("joined", 1)
        if rank > plan["receivers"]:
            raise WeightUpdateError(f"{engine}: {source} sends only to {plan['receivers']} receivers")
        while not store.check(["go"]):
            if ended := deadline.over():
                raise RuntimeError(f"the sender did not begin {ended}")
            time.sleep(0.005)
        control = Control(store, _address_towards(source), rank, plan["receivers"] + 1, deadline)
        device = HOST if plan["device"] == HOST.type else device
        if device.type != plan["device"]:
            raise WeightUpdateError(f"{engine} is on {device.type}, its weights are on {plan['device']}")
        digest = Digest()
        # Closed before the sender hears that all is well: it frees what it has shared.
        with closing(self.open_carrier(control, device, 0)) as carrier:
            bucket = _receive(control, carrier)
            while bucket.bytes is not None:
                weights, bucket = _taken(bucket, digest), _NOTHING
                yield next(weights)
                # Only now has the engine let go of the bucket before: there is never a third one. The thread
                # takes no part in a bucket that nobody waits for, so giving up is noticed at the next.
                ahead = in_background(lambda: _receive(control, carrier))
                yield from weights
                bucket = ahead.result()
        metadata = bucket.metadata
        if "abort" in metadata:
            raise WeightUpdateError(
                f"{engine}: the sender aborted weight update {update.version}: {metadata['abort']}"
            )
        end = WeightUpdate(update.version, (source,), **metadata["end"])
        contents.digest = digest.hex()
        try:
            digest.check(end, engine)
        except WeightUpdateError as error:
            store.set(f"reply/{rank}", str(error))
            raise
        store.set(f"reply/{rank}", "whole")


class StreamSender:
    """The end that has the weights; `receivers` counts the workers of all engines."""

    def __init__(
        self, transport: StreamTransport, host: str, receivers: int, timeout: float, device: torch.device
    ) -> None:
        self.host, self.receivers, self.timeout, self.device = host, receivers, timeout, device
        self._transport = transport
        self._attempts = self._size = 0
        listener = socket.create_server((host, 0), backlog=max(128, receivers))
        port = listener.getsockname()[1]
        self.sources = (StoreSource(transport.name, host, port),)
        self._store = c10d.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )

    def announce(self, version: int, size: int, timeout: float) -> WeightUpdate:
        """The update to announce before `send`; counts and digest come with the weights themselves.

        `size` is about how many bytes there are: limits of time grow with them.
        """
        self._attempts += 1
        self._size, self.timeout = size, timeout
        plan = {
            "version": version,
            "attempt": self._attempts,
            "receivers": self.receivers,
            "device": self.device.type,
        }
        self._store.set("plan", json.dumps(plan))
        return WeightUpdate(version, self.sources, 0, size, "")

    def send(self, tensors: Iterable[Weight], version: int) -> WeightUpdate:
        """Send to all receivers, which are told of the announcement meanwhile, and hear that they have it."""
        store = c10d.PrefixStore(f"attempt/{self._attempts}", self._store)
        try:
            sent = self._send(tensors, version, store, Deadline(self.timeout, store))
        except BaseException as error:
            store.set(ENDED, repr(error))
            raise
        store.set(ENDED, "")
        return sent

    def _send(self, tensors: Iterable[Weight], version: int, store: Any, deadline: Deadline) -> WeightUpdate:
        _wait_for_joins(store, self.receivers, deadline, version)
        store.set("go", "1")
        digest = Digest()
        try:
            control = Control(store, self.host, 0, self.receivers + 1, deadline)
            with closing(self._transport.open_carrier(control, self.device, self._size)) as carrier:
                try:
                    for entries, parts in _buckets(tensors, carrier.bucket_bytes):
                        _send(control, carrier, entries, parts, digest)
                except Exception as error:
                    with contextlib.suppress(RuntimeError):  # the others may be gone as well
                        _tell(control, {"abort": repr(error)}, 0)
                    raise
                end = {"tensors": digest.tensors, "bytes": digest.bytes, "digest": digest.hex()}
                _tell(control, {"end": end}, 0)
                self._hear(store, version, deadline)
        except RuntimeError as error:  # gloo's own, for timeouts and closed connections
            if isinstance(error, WeightUpdateError):
                raise
            raise WeightUpdateError(f"weight update {version} was not sent: {error}") from error
        return WeightUpdate(version, self.sources, digest.tensors, digest.bytes, digest.hex())

    def _hear(self, store: Any, version: int, deadline: Deadline) -> None:
        for rank in range(1, self.receivers + 1):
            store.wait([f"reply/{rank}"], deadline.left())
            reply = store.get(f"reply/{rank}").decode()
            if reply != "whole":
                raise WeightUpdateError(f"weight update {version}: {reply}")


class _Bucket(NamedTuple):
    """One that has arrived, with its check sum; without bytes, the end of an update or why there is none."""

    metadata: dict[str, Any]
    bytes: torch.Tensor | None = None
    total: int = 0


_NOTHING = _Bucket({})


def _receive(control: Control, carrier: Carrier) -> _Bucket:
    metadata, size = _hear_metadata(control)
    if "entries" not in metadata:
        return _Bucket(metadata)
    bucket = carrier.receive(size, metadata["carrier"])
    return _Bucket(metadata, bucket, bucket_checksum(bucket))


def _taken(bucket: _Bucket, digest: Digest) -> Iterator[Weight]:
    """The tensors of a bucket, which they keep alive."""
    assert bucket.bytes is not None
    entries = [_entry(*entry, room=len(bucket.bytes)) for entry in bucket.metadata["entries"]]
    for entry in entries:
        digest.add(entry.name, entry.dtype, entry.shape, entry.size, entry.start)
    digest.add_bucket(bucket.total)
    for entry in entries:
        part = bucket.bytes[entry.start : entry.start + entry.size]
        yield entry.name, part.view(TYPES[entry.dtype]).view(entry.shape)


def _entry(name: str, dtype: str, shape: list[int], start: int, size: int, *, room: int) -> Entry:
    if dtype not in TYPES:
        raise WeightUpdateError(f"a weight update has a tensor of unknown type: {name!r}, {dtype!r}")
    entry = Entry(str(name), dtype, tuple(map(int, shape)), int(start), int(size))
    count = entry.size // TYPES[dtype].itemsize
    fits = 0 <= entry.start <= entry.start + entry.size <= room and entry.start % ALIGNMENT == 0
    if not fits or torch.Size(entry.shape).numel() != count:
        raise WeightUpdateError(f"a weight update has a tensor that is not in its bucket: {entry}")
    return entry


def _wait_for_joins(store: Any, receivers: int, deadline: Deadline, version: int) -> None:
    while (joined := store.add("joined", 0)) < receivers:
        if ended := deadline.over():
            raise WeightUpdateError(
                f"weight update {version}: {joined} of {receivers} receivers came {ended}"
            )
        time.sleep(0.005)


def _attempt(root: Any, plan: dict[str, Any]) -> Any:
    return c10d.PrefixStore(f"attempt/{plan['attempt']}", root)


def _announced(source: StoreSource, version: int, timeout: float) -> Any:
    """The store of the attempt to send a version."""
    root = c10d.TCPStore(
        source.host, source.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    plan = json.loads(root.get("plan"))
    if plan["version"] != version:
        raise WeightUpdateError(f"{source} does not send version {version}, but {plan['version']}")
    return _attempt(root, plan)


def wait_for_end(source: StoreSource, version: int, timeout: float) -> None:
    """Until all receivers have it; raises why they do not, also if somebody has given it up."""
    try:
        attempt = _announced(source, version, timeout)
        attempt.wait([ENDED], timedelta(seconds=timeout))
        problem = attempt.get(ENDED).decode()
    except RuntimeError as error:
        raise WeightUpdateError(
            f"weight update {version} did not end within {timeout:g} s: {error}"
        ) from error
    if problem:
        raise WeightUpdateError(f"weight update {version} was not sent: {problem}")


def give_up(source: StoreSource, version: int, reason: str) -> None:
    """For one who knows that not all receivers will come: nobody waits for them any longer."""
    with contextlib.suppress(RuntimeError):  # nobody is there any more
        attempt = _announced(source, version, REACH)
        if not attempt.check([ENDED]):
            attempt.set(ENDED, reason)


def _address_towards(source: StoreSource) -> str:
    """The address of this machine that reaches the sender; nothing is sent."""
    family = socket.AF_INET6 if ":" in source.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((source.host, source.port))
        return str(probe.getsockname()[0])


def _buckets(tensors: Iterable[Weight], room: int) -> Iterator[tuple[list[Entry], list[torch.Tensor]]]:
    """Tensors gathered until they fill a bucket; a larger one has a bucket of its own."""
    entries: list[Entry] = []
    parts: list[torch.Tensor] = []
    filled = 0
    for name, tensor in tensors:
        size = tensor.nbytes
        if parts and filled + size > room:
            yield entries, parts
            entries, parts, filled = [], [], 0
        entries.append(Entry(name, TYPE_NAMES[tensor.dtype], tuple(tensor.shape), filled, size))
        parts.append(tensor)
        filled += _aligned(size)
    if entries:
        yield entries, parts


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _send(
    control: Control, carrier: Carrier, entries: list[Entry], parts: list[torch.Tensor], digest: Digest
) -> None:
    """One bucket: filled, added to the digest, described, sent."""
    size = entries[-1].start + _aligned(entries[-1].size)
    bucket = carrier.buffer(size)
    if size > sum(entry.size for entry in entries):
        bucket.zero_()  # what is between tensors is sent and counted as well
    for entry, tensor in zip(entries, parts, strict=True):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if entry.size else bucket[:0]
        bucket[entry.start : entry.start + entry.size].copy_(flat)
    parts.clear()
    for entry in entries:
        digest.add(entry.name, entry.dtype, entry.shape, entry.size, entry.start)
    digest.add_bucket(bucket_checksum(bucket))
    _tell(control, {"entries": entries, "carrier": carrier.describe()}, size)
    carrier.send(bucket)


def _tell(control: Control, metadata: dict[str, Any], size: int) -> None:
    """`size`: of the bucket that the metadata describe."""
    text = json.dumps(metadata).encode()
    control.broadcast(torch.tensor([len(text), size], dtype=torch.int64))
    control.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8))


def _hear_metadata(control: Control) -> tuple[dict[str, Any], int]:
    sizes = torch.zeros(2, dtype=torch.int64)
    control.broadcast(sizes)
    text = torch.empty(int(sizes[0]), dtype=torch.uint8)
    control.broadcast(text)
    metadata: dict[str, Any] = json.loads(text.numpy().tobytes())
    return metadata, int(sizes[1])
