"""Weights from one process to workers on other hosts: host tensors over a collective made for this alone.

The store listens on an address that the caller names, never on all of them, and each update has a group of
its own: one that failed leaves nothing behind for the next.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from isotrain.errors import WeightUpdateError
from isotrain.rollout.base import WeightUpdate
from isotrain.rollout.transfer import TYPE_NAMES, TYPES, Digest, checksum, host_bytes, tensor_over

c10d: Any = torch.distributed  # its types leave out what is used here

BUCKET = 64 << 20
# In a bucket each tensor begins at a multiple of this, so that any type can be read in place.
ALIGNMENT = 64


class BroadcastSender:
    """The end that has the weights; `receivers` counts the workers of all engines."""

    def __init__(self, host: str, receivers: int, timeout: float) -> None:
        self.host, self.receivers, self.timeout = host, receivers, timeout
        self._attempts = 0
        listener = socket.create_server((host, 0), backlog=max(128, receivers))
        port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        self._store = c10d.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )

    def announce(self, version: int) -> WeightUpdate:
        """What to tell the engines before `send`; counts and digest come with the weights themselves."""
        self._attempts += 1
        plan = {"version": version, "attempt": self._attempts, "receivers": self.receivers}
        self._store.set("plan", json.dumps(plan))
        return WeightUpdate(version, self.address, 0, 0, "")

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Send to all receivers, which are told of the announcement meanwhile, and hear that they have it."""
        attempt = self._attempts
        deadline = _Deadline(self.timeout)
        store = c10d.PrefixStore(f"attempt/{attempt}", self._store)
        _wait_for_joins(store, self.receivers, deadline, version)
        store.set("go", "1")
        digest = Digest()
        try:
            group = _group(store, self.host, 0, self.receivers + 1, deadline)
            try:
                for metadata, payload in _buckets(tensors, digest):
                    _send(group, metadata, payload, deadline)
            except Exception as error:
                with contextlib.suppress(RuntimeError):  # the others may be gone as well
                    _send(group, {"abort": repr(error)}, None, deadline)
                raise
            end = {"tensors": digest.tensors, "bytes": digest.bytes, "digest": digest.hex()}
            _send(group, {"end": end}, None, deadline)
            self._hear(store, version, deadline)
        except RuntimeError as error:  # gloo's own, for timeouts and closed connections
            if isinstance(error, WeightUpdateError):
                raise
            raise WeightUpdateError(f"weight update {version} was not sent: {error}") from error
        return WeightUpdate(version, self.address, digest.tensors, digest.bytes, digest.hex())

    def _hear(self, store: Any, version: int, deadline: _Deadline) -> None:
        for rank in range(1, self.receivers + 1):
            store.wait([f"reply/{rank}"], deadline.left())
            reply = store.get(f"reply/{rank}").decode()
            if reply != "whole":
                raise WeightUpdateError(f"weight update {version}: {reply}")


class _Deadline:
    """One end for all the waiting of an update."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> timedelta:
        return timedelta(seconds=max(0.05, self._end - time.monotonic()))

    def over(self) -> bool:
        return time.monotonic() > self._end


def receive_update(update: WeightUpdate, engine: str, timeout: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors as they arrive; whether they were whole is known, and raised, only at the end."""
    try:
        yield from _receive(update, engine, timeout)
    except WeightUpdateError:
        raise
    except RuntimeError as error:
        raise WeightUpdateError(
            f"{engine}: weight update {update.version} did not arrive from {update.address} "
            f"within {timeout:g} s: {error}"
        ) from error


def _receive(update: WeightUpdate, engine: str, timeout: float) -> Iterator[tuple[str, torch.Tensor]]:
    host, _, port = update.address.rpartition(":")
    deadline = _Deadline(timeout)
    root = c10d.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=deadline.left())
    plan = json.loads(root.get("plan"))
    if plan["version"] != update.version:
        raise WeightUpdateError(
            f"{engine}: weight update {update.version} was announced, {update.address} has {plan['version']}"
        )
    store = c10d.PrefixStore(f"attempt/{plan['attempt']}", root)
    rank = store.add("joined", 1)
    if rank > plan["receivers"]:
        raise WeightUpdateError(f"{engine}: {update.address} sends only to {plan['receivers']} receivers")
    store.wait(["go"], deadline.left())
    group = _group(store, _address_towards(host, int(port)), rank, plan["receivers"] + 1, deadline)
    digest = Digest()
    while True:
        metadata, payload = _receive_bucket(group, deadline)
        if "abort" in metadata:
            raise WeightUpdateError(
                f"{engine}: the sender aborted weight update {update.version}: {metadata['abort']}"
            )
        if "end" in metadata:
            break
        view = payload.numpy().data
        for name, dtype, shape, start, size in metadata["entries"]:
            digest.add(name, dtype, tuple(shape), size, checksum(view[start : start + size]))
            yield name, tensor_over(view, dtype, tuple(shape), start)
    end = WeightUpdate(update.version, update.address, **metadata["end"])
    try:
        digest.check(end, engine)
        if update.digest:
            digest.check(update, engine)
    except WeightUpdateError as error:
        store.set(f"reply/{rank}", str(error))
        raise
    store.set(f"reply/{rank}", "whole")


def _wait_for_joins(store: Any, receivers: int, deadline: _Deadline, version: int) -> None:
    while (joined := store.add("joined", 0)) < receivers:
        if deadline.over():
            raise WeightUpdateError(
                f"weight update {version}: {joined} of {receivers} receivers came "
                f"within {deadline.seconds:g} s"
            )
        time.sleep(0.005)


def _group(store: Any, host: str, rank: int, size: int, deadline: _Deadline) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = deadline.left()
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _address_towards(host: str, port: int) -> str:
    """The address of this machine that reaches the sender; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], digest: Digest
) -> Iterator[tuple[dict[str, Any], list[memoryview]]]:
    """Tensors gathered until they fill a bucket; a larger one has a bucket of its own."""
    entries: list[tuple[str, str, tuple[int, ...], int, int]] = []
    payload: list[memoryview] = []
    filled = 0
    for name, tensor in tensors:
        size = tensor.nbytes
        if payload and filled + size > BUCKET:
            yield {"entries": entries}, payload
            entries, payload, filled = [], [], 0
        data, dtype, shape = host_bytes(tensor), TYPE_NAMES[tensor.dtype], tuple(tensor.shape)
        digest.add(name, dtype, shape, size, checksum(data))
        entries.append((name, dtype, shape, filled, size))
        payload.append(data)
        filled += _aligned(size)
    if entries:
        yield {"entries": entries}, payload


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _send(
    group: Any, metadata: dict[str, Any], payload: list[memoryview] | None, deadline: _Deadline
) -> None:
    text = json.dumps(metadata).encode()
    parts = payload or []
    total = sum(_aligned(len(part)) for part in parts)
    _broadcast(group, torch.tensor([len(text), total], dtype=torch.int64), deadline)
    _broadcast(group, torch.frombuffer(bytearray(text), dtype=torch.uint8), deadline)
    if total:
        bucket = torch.zeros(total, dtype=torch.uint8)
        start = 0
        view = bucket.numpy().data
        for part in parts:
            view[start : start + len(part)] = part
            start += _aligned(len(part))
        _broadcast(group, bucket, deadline)


def _receive_bucket(group: Any, deadline: _Deadline) -> tuple[dict[str, Any], torch.Tensor]:
    sizes = torch.zeros(2, dtype=torch.int64)
    _broadcast(group, sizes, deadline)
    text = torch.empty(int(sizes[0]), dtype=torch.uint8)
    _broadcast(group, text, deadline)
    payload = torch.empty(int(sizes[1]), dtype=torch.uint8)
    if payload.numel():
        _broadcast(group, payload, deadline)
    metadata: dict[str, Any] = json.loads(text.numpy().tobytes())
    unknown = [entry for entry in metadata.get("entries", []) if entry[1] not in TYPES]
    if unknown:
        raise WeightUpdateError(f"a weight update has tensors of unknown types: {unknown[:3]}")
    return metadata, payload


def _broadcast(group: Any, tensor: torch.Tensor, deadline: _Deadline) -> None:
    options = c10d.BroadcastOptions()
    options.rootRank = 0
    options.timeout = deadline.left()
    group.broadcast([tensor], options).wait(deadline.left())
