"""The interface of every way that weights take from ranks to engines, and the ways that there are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

from isotrain.weights.devices import BroadcastTransport, IpcTransport
from isotrain.weights.digest import Contents, Weight
from isotrain.weights.file import FileTransport
from isotrain.weights.update import Routes, WeightUpdate

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
