"""Weights from device memory straight into that of engines: broadcast, or shared on one device."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from isotrain.device.accelerator import Accelerator
from isotrain.device.detect import find_device
from isotrain.device.exchange import abort, open_shared, private_group, share
from isotrain.errors import WeightUpdateError
from isotrain.weights.digest import HOST
from isotrain.weights.stream import Carrier, Control, StreamTransport, from_sender
from isotrain.weights.update import Routes

if TYPE_CHECKING:
    from isotrain.cluster.placement import Placement

c10d: Any = torch.distributed  # its types leave out what is used here

LOOPBACK = "127.0.0.1"
# torch ends a process whose collective takes longer than its group's limit; ours must come long before that.
BEYOND_DEADLINE = timedelta(minutes=10)


class BroadcastTransport(StreamTransport):
    """By the devices' own collectives; through host memory if the sender's device is the host."""

    name = "broadcast"

    def routes(self, placement: Placement, tensor_parallel: int) -> Routes | None:
        """Rank 0 sends to all. No collective has two processes on one device."""
        if _ranks_beside(placement) is not None:
            return None
        engines, others = len(placement.engines), len(placement.ranks) - 1
        hosts = tuple(slot.host for slot in placement.ranks)
        return Routes(self.name, ((0,),) * engines, (engines * tensor_parallel, *[0] * others), hosts)

    def open_carrier(self, control: Control, device: torch.device, expected: int) -> Carrier:
        if device.type == HOST.type:
            return HostCarrier(control)
        return CollectiveCarrier(control, device, expected)


class IpcTransport(StreamTransport):
    """Engines on the ranks' devices read the memory of the rank there."""

    name = "ipc"

    def routes(self, placement: Placement, tensor_parallel: int) -> Routes | None:
        if (taken := _ranks_beside(placement)) is None:
            return None
        counts, ranks = Counter(rank for ranks in taken for rank in ranks), range(len(placement.ranks))
        return Routes(self.name, taken, tuple(counts[rank] for rank in ranks), (LOOPBACK,) * len(ranks))

    def open_carrier(self, control: Control, device: torch.device, expected: int) -> Carrier:
        return SharedCarrier(control, device, expected)


def _ranks_beside(placement: Placement) -> tuple[tuple[int, ...], ...] | None:
    """The rank on the device of each worker of each engine; None where a worker has a device of its own."""
    at = {(slot.node, number): rank for rank, slot in enumerate(placement.ranks) for number in slot.devices}
    beside = [[at.get((slot.node, number)) for number in slot.devices] for slot in placement.engines]
    if any(rank is None for ranks in beside for rank in ranks):
        return None
    return tuple(tuple(rank for rank in ranks if rank is not None) for ranks in beside)


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

    def __init__(self, control: Control, device: torch.device, expected: int) -> None:
        accelerator = find_device(device.type)
        if not isinstance(accelerator, Accelerator):
            raise WeightUpdateError(f"weights cannot be sent from device to device: {device.type} is none")
        if device.index is None:
            device = torch.device(device.type, accelerator.module.current_device())
        self._control, self._accelerator, self._device = control, accelerator, device
        self._select()
        self._least = min(self.bucket_bytes, expected)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def buffer(self, size: int) -> torch.Tensor:
        if len(self._buffer) < size:
            self._buffer = self._buffer[:0].clone()  # the old one goes first: there is room for one
            # At once as large as the usual bucket, so that it hardly ever grows.
            self._buffer = torch.zeros(max(size, self._least), dtype=torch.uint8, device=self._device)
        return self._buffer[:size]

    def _select(self) -> None:
        """Each thread has a device of its own, and buckets are taken by new ones."""
        self._accelerator.module.set_device(self._device)

    def close(self) -> None:
        self._buffer = self._buffer[:0].clone()


class CollectiveCarrier(_DeviceCarrier):
    """To devices of others, on this and other machines."""

    def __init__(self, control: Control, device: torch.device, expected: int) -> None:
        super().__init__(control, device, expected)
        # Made in the same order by all, and used for this attempt only.
        store = c10d.PrefixStore("device", control.store)
        timeout = control.deadline.left() + BEYOND_DEADLINE
        self._group = private_group(self._accelerator.backend, store, control.rank, control.size, timeout)

    def describe(self) -> dict[str, Any]:
        return {}

    def send(self, bucket: torch.Tensor) -> None:
        self._broadcast(bucket)

    def receive(self, size: int, described: dict[str, Any]) -> torch.Tensor:
        self._select()
        bucket = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._broadcast(bucket)
        return bucket

    def _broadcast(self, bucket: torch.Tensor) -> None:
        deadline = self._control.deadline
        work = self._group.broadcast([bucket], from_sender(deadline, BEYOND_DEADLINE))
        # Waiting for the work itself would only queue the wait on the device, where it has no end.
        while not work.is_completed():
            if ended := deadline.over():
                problem = f"a bucket of weights did not arrive {ended}"
                abort(self._group, problem)
                raise WeightUpdateError(problem)
            time.sleep(0.0005)
        work.wait()


class SharedCarrier(_DeviceCarrier):
    """To another process on the same device: it reads the sender's buffer."""

    def __init__(self, control: Control, device: torch.device, expected: int) -> None:
        super().__init__(control, device, expected)
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
        self._select()
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
