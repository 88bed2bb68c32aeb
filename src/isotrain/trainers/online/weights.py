"""New weights on their way from the ranks to all engines, and the check that every engine has them.

T: tokens of the weight check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isotrain.cluster.background import in_background
from isotrain.cluster.failures import Overdue, WorkerDied
from isotrain.cluster.placement import Placement, Seat
from isotrain.cluster.replaceable import Died, Replaceable, Task
from isotrain.cluster.workers import Call, Member, WorkerGroup, wait_any
from isotrain.errors import WeightUpdateError
from isotrain.rollout.base import WeightUpdate
from isotrain.rollout.relay import Relay
from isotrain.trainers.online.policy_rank import PolicyRank
from isotrain.trainers.online.rollout_worker import RolloutWorker


class Weights(NamedTuple):
    version: int
    updates: list[WeightUpdate]
    """Where each engine finds them."""
    logps: npt.NDArray[np.float32]
    """The trained model's log-probs of a fixed prompt with these weights."""


@dataclass(frozen=True)
class Delivery:
    """Weights on their way to one engine."""

    free: Task[Call[None]]
    """Done when the engine has finished its earlier calls."""
    update: Task[Call[int]]
    logps: Task[Call[npt.NDArray[np.float32]]]
    weights: Weights


@dataclass(frozen=True)
class Tolerance:
    """How far log-probs of a fixed prompt may differ: at the first update, then relative to earlier ones.

    Rounding differs from model to model, and grows slowly as a model leaves that prompt behind; weights that
    an engine did not take show at once.
    """

    first: float
    least: float
    most: float
    factor: float = 4.0

    def after(self, largest: float | None) -> float:
        """`largest`: of all updates so far."""
        return self.first if largest is None else min(self.most, max(self.least, self.factor * largest))


class Engines(Replaceable[RolloutWorker]):
    """Updates are queued behind what an engine is doing, and every one is verified.

    The engine itself compares what it got with the update's digest. Here its version is compared, and its
    log-probs of a fixed prompt with those of the trained model, which shows that the weights also mean the
    same. Earlier calls of an engine may take any time: the timeout of an update begins after them.
    """

    def __init__(
        self,
        group: WorkerGroup[RolloutWorker],
        start_timeout: float,
        tell: Callable[[str], None],
        *,
        check_T: npt.NDArray[np.int32],
        timeout: float,
        tolerance: Tolerance,
    ) -> None:
        super().__init__(group, start_timeout, tell)
        self.check_T, self.timeout, self.tolerance = check_T, timeout, tolerance
        self.newest: Weights | None = None
        self.under_way: list[Delivery] = []
        self._verification: Future[float] | None = None
        """Of what is under way, once somebody watches it."""
        self.difference = 0.0
        """In the weight check, of the update that was verified last."""
        self.largest: float | None = None
        """In the weight check, of all updates."""

    def send(self, weights: Weights) -> None:
        """Announce new weights; `settle` waits until they are taken."""
        self.newest, self._verification = weights, None
        self.under_way = [self._send_to(index, weights) for index in range(len(self))]

    def _send_to(self, index: int, weights: Weights) -> Delivery:
        with self._places[index]:  # no thread may ask for responses in between
            free = self.submit(index, RolloutWorker.report)
            update = self.submit(index, RolloutWorker.update, weights.updates[index])
            logps = self.submit(index, RolloutWorker.weight_check, self.check_T)
            return Delivery(free, update, logps, weights)

    def settle(self) -> float:
        """Wait until all engines have the newest weights; returns the weight check's largest difference."""
        return self._settle() if self._verification is None else self._verification.result()

    def verifying(self) -> Future[float]:
        """What `settle` will return or raise, without waiting for it."""
        if self._verification is None:
            self._verification = in_background(self._settle)
        return self._verification

    def _settle(self) -> float:
        deliveries, self.under_way = self.under_way, []
        verified = [self._verified(delivery) for delivery in deliveries]
        if found := [difference for difference in verified if difference is not None]:
            self.difference = max(found)
            self.largest = max(self.difference, self.largest or 0.0)
        return self.difference

    def _verified(self, delivery: Delivery) -> float | None:
        name, weights = engine_name(delivery.update.index), delivery.weights
        self.result(delivery.free)
        try:
            version = self.result(delivery.update, self.timeout)
            logps = self.result(delivery.logps, self.timeout)
        except Overdue as error:
            raise WeightUpdateError(
                f"{name}: weight update {weights.version} did not end within {self.timeout:g} s "
                "(rollout.update_timeout)"
            ) from error
        if isinstance(version, Died) or isinstance(logps, Died):
            return None  # its successor has been given the newest weights, and they were verified
        return self._compared(name, version, logps, weights)

    def _compared(self, name: str, version: int, logps: npt.NDArray[np.float32], weights: Weights) -> float:
        if version != weights.version:
            raise WeightUpdateError(f"{name} has weights of version {version} after update {weights.version}")
        difference = float(np.abs(logps - weights.logps).mean())
        allowed = self.tolerance.after(self.largest)
        if not difference <= allowed:
            raise WeightUpdateError(
                f"{name}: after weight update {weights.version} its log-probs differ from the trained model "
                f"by {difference:.3g} on average; {allowed:.3g} is allowed (rollout.weight_check_tolerance)"
            )
        return difference

    def prepare(self, index: int) -> None:
        super().prepare(index)
        if (weights := self.newest) is not None:
            engine = self.group.within(self.timeout)
            version = engine.call_on(index, RolloutWorker.update, weights.updates[index])
            logps = engine.call_on(index, RolloutWorker.weight_check, self.check_T)
            self._compared(engine_name(index), version, logps, weights)


def engine_name(index: int) -> str:
    return f"rollout engine {index}"


LEEWAY = 10.0


@dataclass
class Relays:
    """From the update that rank 0 wrote to the one that each engine finds on its own machine."""

    ranks: WorkerGroup[PolicyRank]
    group: Replaceable[Relay]
    of_engine: Sequence[int | None]
    """Which relay's file an engine reads; None for that of rank 0."""
    host: str
    timeout: float

    def spread(self, update: WeightUpdate) -> list[WeightUpdate]:
        """The update for each engine."""
        files = self._send(update) if len(self.group) else []
        return [update if relay is None else files[relay] for relay in self.of_engine]

    def _send(self, update: WeightUpdate) -> list[WeightUpdate]:
        self.group.on_all(Relay.start, self.timeout)  # one that has died since is replaced here
        announced = self.ranks.within(self.timeout).call_on(
            0, PolicyRank.announce, update.version, self.host, len(self.group), self.timeout
        )
        relays = self.group.group
        pending: list[tuple[WorkerGroup[Any], Call[Any]]] = [
            (relays, call) for call in relays.submit(Relay.take, announced)
        ]
        pending.append((self.ranks, self.ranks.submit_to(0, PolicyRank.relay, update)))
        files: dict[int, WeightUpdate] = {}
        # They have this limit themselves: only a dead one takes longer.
        deadline = time.monotonic() + self.timeout + LEEWAY
        # Together: both sides wait for each other, and the first that fails knows why.
        while pending:
            ready = wait_any(relays.watch, [call for _, call in pending], deadline)
            if not ready:
                raise WeightUpdateError(f"weight update {update.version} did not end{self._late(pending)}")
            for group, call in [pending.pop(number) for number in reversed(ready)]:
                try:
                    (value,) = group.results([call])
                except (WorkerDied, WeightUpdateError) as error:
                    raise WeightUpdateError(
                        f"weight update {update.version}: {error}{self._late(pending)}"
                    ) from error
                if group is relays:
                    files[call.index] = value
        return [files[index] for index in range(len(self.group))]

    def _late(self, pending: Sequence[tuple[WorkerGroup[Any], Call[Any]]]) -> str:
        relays = self.group.group
        places = dict(enumerate(relays.whereabouts))
        late = [f"weight relay {c.index} on {places[c.index].host}" for g, c in pending if g is relays]
        return f"; waiting for {', '.join(late)}" if late else ""


def relay_members(placement: Placement, timeout: float) -> list[Member]:
    """One relay for each machine that has an engine but not the rank that writes the weights."""
    return [
        Member((f"weight relay {number}", timeout), None, seat)
        for number, seat in enumerate(_away(placement).values())
    ]


def relay_of_engines(placement: Placement) -> list[int | None]:
    away = list(_away(placement))
    return [away.index(seat.node) if seat.node in away else None for seat in placement.engines]


def _away(placement: Placement) -> dict[str, Seat]:
    home = placement.ranks[0].node
    return {seat.node: seat for seat in reversed(placement.engines) if seat.node != home}
