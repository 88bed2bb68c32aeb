"""How the bytes of a bucket get from a sender of weights to its receivers, once these know what is in it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed

from isotrain.device.accelerator import Accelerator
from isotrain.device.detect import find_device
from isotrain.device.exchange import open_shared, private_group, share
from isotrain.errors import WeightUpdateError

c10d: Any = torch.distributed  # its types leave out what is used here

Way = Literal["host", "collective", "shared"]
"""Through host memory; through the device's own collectives; or in device memory that both sides see."""


# From so many processes on, they connect only as they need it.
CONNECT_ON_DEMAND = 128
# torch ends a process whose collective takes longer than its group's limit; ours must come long before that.
BEYOND_DEADLINE = timedelta(minutes=10)


class Deadline:
    """One end for all the waiting of an update."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> timedelta:
        return timedelta(seconds=max(0.05, self._end - time.monotonic()))

    def over(self) -> bool:
        return time.monotonic() > self._end


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
        self._group.broadcast([tensor], _from_sender(self.deadline)).wait(self.deadline.left())

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
        """What receivers must know of the filled buffer to take a bucket from it; plain values."""

    def send(self, bucket: torch.Tensor) -> None:
        """Returns when all receivers have taken it, or never will."""

    def receive(self, size: int, described: dict[str, Any]) -> torch.Tensor:
        """Bytes that are the receiver's own, as long as it wants them."""

    def close(self) -> None:
        """Let go of everything that both sides share."""


def open_carrier(way: Way, device: torch.device, control: Control, expected: int = 0) -> Carrier:
    """One that ends with the attempt; both sides must open the same. `expected` are all bytes to be sent."""
    if way == "host":
        return HostCarrier(control)
    accelerator = find_device(device.type)
    if not isinstance(accelerator, Accelerator):
        raise WeightUpdateError(f"weights cannot be sent to {device.type} by way of {way!r}")
    kind = CollectiveCarrier if way == "collective" else SharedCarrier
    return kind(control, accelerator, device, expected)


class HostCarrier:
    """Between machines, where one side has no device."""

    bucket_bytes = 64 << 20

    def __init__(self, control: Control) -> None:
        self._control = control

    def buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def describe(self) -> dict[str, Any]:
        return {}

    def send(self, bucket: torch.Tensor) -> None:
        self._control.broadcast(bucket)

    def receive(self, size: int, described: dict[str, Any]) -> torch.Tensor:
        bucket = torch.empty(size, dtype=torch.uint8)
        self._control.broadcast(bucket)
        return bucket

    def close(self) -> None: ...


class _DeviceCarrier:
    bucket_bytes = 256 << 20

    def __init__(
        self, control: Control, accelerator: Accelerator, device: torch.device, expected: int
    ) -> None:
        self._control, self._accelerator, self._device = control, accelerator, device
        if device.index is not None:
            accelerator.module.set_device(device)  # each thread has its own, and this may be a new one
        self._least = min(self.bucket_bytes, expected)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def buffer(self, size: int) -> torch.Tensor:
        if len(self._buffer) < size:
            self._buffer = self._buffer[:0].clone()  # the old one goes first: there is room for one
            # At once as large as the usual bucket, so that it hardly ever grows.
            self._buffer = torch.zeros(max(size, self._least), dtype=torch.uint8, device=self._device)
        return self._buffer[:size]

    def close(self) -> None:
        self._buffer = self._buffer[:0].clone()


class CollectiveCarrier(_DeviceCarrier):
    """To devices of others, on this and other machines."""

    def __init__(
        self, control: Control, accelerator: Accelerator, device: torch.device, expected: int
    ) -> None:
        super().__init__(control, accelerator, device, expected)
        # Made in the same order by all, and used for this attempt only.
        store = c10d.PrefixStore("device", control.store)
        timeout = control.deadline.left() + BEYOND_DEADLINE
        self._group = private_group(accelerator.backend, store, control.rank, control.size, timeout)

    def describe(self) -> dict[str, Any]:
        return {}

    def send(self, bucket: torch.Tensor) -> None:
        self._broadcast(bucket)

    def receive(self, size: int, described: dict[str, Any]) -> torch.Tensor:
        bucket = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._broadcast(bucket)
        return bucket

    def _broadcast(self, bucket: torch.Tensor) -> None:
        deadline = self._control.deadline
        work = self._group.broadcast([bucket], _from_sender(deadline, BEYOND_DEADLINE))
        # Waiting for the work itself would only queue the wait on the device, where it has no end.
        while not work.is_completed():
            if deadline.over():
                self._group.abort()
                raise WeightUpdateError(f"a bucket of weights did not arrive within {deadline.seconds:g} s")
            time.sleep(0.0005)
        work.wait()


class SharedCarrier(_DeviceCarrier):
    """To another process on the same device: it reads the sender's buffer."""

    def __init__(
        self, control: Control, accelerator: Accelerator, device: torch.device, expected: int
    ) -> None:
        super().__init__(control, accelerator, device, expected)
        self._described: list[Any] = []
        self._opened: tuple[list[Any], torch.Tensor] | None = None

    def buffer(self, size: int) -> torch.Tensor:
        grows = size > len(self._buffer)
        bucket = super().buffer(size)
        if grows:
            self._described = share(self._buffer)
        return bucket

    def describe(self) -> dict[str, Any]:
        self._accelerator.synchronize()  # no queue orders what two processes do
        return {"shared": self._described, "size": len(self._buffer)}

    def send(self, bucket: torch.Tensor) -> None:
        self._control.meet()

    def receive(self, size: int, described: dict[str, Any]) -> torch.Tensor:
        if self._opened is None or self._opened[0] != described["shared"]:
            self._opened = None
            whole = int(described["size"])
            opened = open_shared(described["shared"], whole, self._device, self._accelerator.rebuild_shared)
            self._opened = (described["shared"], opened)
        bucket = self._opened[1][:size].clone()
        self._accelerator.synchronize()
        self._control.meet()
        return bucket

    def close(self) -> None:
        self._opened = None
        super().close()
        self._accelerator.free_shared()


def _from_sender(deadline: Deadline, beyond: timedelta = timedelta()) -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank = 0
    options.timeout = deadline.left() + beyond
    return options
