"""The interface of transports from ranks to engines, those that exist, and the checks where they arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

from isotrain.errors import WeightUpdateError
from isotrain.weights.devices import BroadcastTransport, IpcTransport
from isotrain.weights.digest import Contents, Weight
from isotrain.weights.file import FileTransport
from isotrain.weights.update import Routes, WeightUpdate, update_limit

if TYPE_CHECKING:
    from isotrain.cluster.placement import Placement  # with Ray, which engines do not need


class Sender(Protocol):
    """A rank's end of a transport."""

    def announce(self, version: int, size: int, timeout: float) -> WeightUpdate | None:
        """The update that engines are told before `send`; None where they are told what `send` returns.

        `size` is about how many bytes there are.
        """

    def send(self, tensors: Iterable[Weight], version: int) -> WeightUpdate:
        """Returns when the receivers have all of it, or when it is where they find it."""


class Transport(Protocol):
    """A new one is a class with these methods, a line in `TRANSPORTS` and a line in `update.SOURCES`."""

    @property
    def together(self) -> bool:
        """Whether engines take weights while they are sent; otherwise they can be read later, and again."""

    def routes(self, placement: Placement, tensor_parallel: int) -> Routes | None:
        """In the controller: which rank sends to which engines; None where it does not reach all of them."""

    def open(self, host: str, receivers: int, timeout: float, device: torch.device) -> Sender:
        """In a rank: its end, which listens on `host` if it has to listen, and sends from `device`."""

    def receive(
        self, update: WeightUpdate, engine: str, timeout: float, device: torch.device, worker: int = 0
    ) -> AbstractContextManager[Contents]:
        """In a worker of an engine: the tensors, which may not be used after the context is left.

        Raises where they are not those that `update` describes, before the first one or after the last.
        """


# Best first; the last works everywhere.
TRANSPORTS: dict[str, Transport] = {
    "ipc": IpcTransport(),
    "broadcast": BroadcastTransport(),
    "file": FileTransport(),
}


def error_within(seconds: float, act: Callable[[], object]) -> str:
    """Why the call has failed, or that it goes on after its time; empty where it has succeeded.

    For calls that may hang in a driver or on a network, where no time limit of theirs can be trusted. One
    that hangs keeps its thread, which does not keep the process from ending.
    """
    outcome: list[str] = []

    def attempt() -> None:
        try:
            act()
        except Exception as error:  # of any kind, from drivers as well
            outcome.append(f"{type(error).__name__}: {error}")
        else:
            outcome.append("")

    thread = threading.Thread(target=attempt, name="attempt", daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else f"no end within {seconds:g} s"


def open_incoming(
    update: WeightUpdate, engine: str, timeout: float, device: torch.device, worker: int = 0
) -> AbstractContextManager[Contents]:
    """A file is verified before its first tensor is given out, what is sent only after its last.

    `worker`: which of the engine's workers takes them; `timeout` is `rollout.update_timeout`.
    """
    transport, limit = TRANSPORTS[update.source(worker).transport], update_limit(timeout, update.bytes)
    return transport.receive(update, engine, limit, device, worker)


def rehearse_incoming(
    update: WeightUpdate,
    engine: str,
    timeout: float,
    device: torch.device,
    worker: int = 0,
    workers: int = 1,
) -> str:
    """Receive what is sent and drop it; returns the error, in time also where a driver or network hangs.

    `update.bytes` is the size of the second buffer for which the devices of the engine's `workers` must have
    room together; 0 for none.
    """

    def receive() -> None:
        if update.bytes:
            _check_room(-(-update.bytes // workers), device)
        with open_incoming(update, engine, timeout, device, worker) as contents:
            for _ in contents.tensors:
                pass

    return error_within(timeout, receive)


def _check_room(size: int, device: torch.device) -> None:
    try:
        torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise WeightUpdateError(
            f"no room for a second buffer of {size / 1e9:.3g} GB beside the engine: lower "
            f"rollout.memory_utilization or raise rollout.tensor_parallel: {error}"
        ) from error


def erase(tensors: Iterable[torch.Tensor]) -> None:
    """Fill what an update must write with NaN: a tensor that it leaves out is then seen, however small the
    update is. Types without NaN keep their values."""
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            tensor.detach().fill_(torch.nan)


def unwritten(named: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that hold a NaN."""
    floating = {name: t for name, t in named.items() if t.is_floating_point() and t.numel()}
    if not floating:
        return []
    # A sum is NaN as soon as one element is, and needs no second tensor of the same size.
    sums = torch.stack([tensor.detach().sum(dtype=torch.float32) for tensor in floating.values()])
    return [name for name, is_nan in zip(floating, sums.isnan().tolist(), strict=True) if is_nan]


def check_written(update: WeightUpdate, engine: str, left: Collection[str], count: int) -> None:
    """`left`: what still holds the NaN of `erase`, of `count` tensors."""
    if left:
        raise WeightUpdateError(
            f"{engine}: weight update {update.version} did not write {len(left)} of {count} tensors: "
            f"{', '.join(sorted(left)[:5])}; before an update the engine fills them with NaN, and that is "
            "what they hold. Either the trained weights are NaN, or the engine does not load these tensors "
            "of this model: use another version of it or another rollout.engine"
        )
