"""New weights on their way from the ranks to all engines, and the check that every engine has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
from isotrain.trainers.online.weight_check import Tolerance, WeightCheck, mean_difference


class Weights(NamedTuple):
    version: int
    updates: list[WeightUpdate] | None
    """Where each engine finds them; None where they were sent and are nowhere to be found again."""
    logps: npt.NDArray[np.float32]
    """The trained model's log-probs of the prompts of the weight check, with these weights."""


@dataclass(frozen=True)
class Delivery:
    """Weights on their way to one engine."""

    free: Task[Call[None]] | None
    """Done when the engine has finished its earlier calls; in flight, they are not waited for."""
    update: Task[Call[tuple[int, npt.NDArray[np.float32]]]]
    weights: Weights


class Engines(Replaceable[RolloutWorker]):
    """Updates are queued behind what an engine is doing, or come between its tokens; every one is verified.

    The engine itself compares what it got with the update's digest. Here its version is compared, and its
    log-probs of fixed prompts with those of the trained model (weight_check.py), which shows that the weights
    also mean the same. Earlier calls of an engine may take any time: the timeout of an update begins after
    them, or at once where updates are `in_flight`.
    """

    def __init__(
        self,
        group: WorkerGroup[RolloutWorker],
        start_timeout: float,
        tell: Callable[[str], None],
        *,
        check_prompts: Sequence[npt.NDArray[np.int32]],
        timeout: float,
        tolerance: Tolerance,
        in_flight: bool = False,
    ) -> None:
        super().__init__(group, start_timeout, tell)
        self.in_flight = in_flight
        self.check_prompts, self.timeout = check_prompts, timeout
        self._check = WeightCheck(tolerance)
        self.newest: Weights | None = None
        self.under_way: list[Delivery] = []
        self._verification: Future[float] | None = None
        """Of what is under way, once somebody watches it."""
        self.difference = 0.0
        """In the weight check, of the update that was verified last."""
        self.write_again: Callable[[Weights], Weights] | None = None
        """Writes weights that were sent to where they can be found."""

    def verify(self) -> float:
        """Check that all engines have the newest weights; returns the largest difference."""
        weights, found = self.newest, []
        assert weights is not None
        method = RolloutWorker.version_and_check
        for task in [self.submit(index, method, self.check_prompts) for index in range(len(self))]:
            told = self.result(task, self.timeout)
            if not isinstance(told, Died):  # a successor was verified when it was given them
                found.append(self._compared(task.index, *told, weights))
        return self._noted(found)

    @property
    def first_version(self) -> int:
        """What responses that are asked for now must begin with; 0 where calls keep their order anyway."""
        return self.newest.version if self.in_flight and self.newest else 0

    def send(self, weights: Weights) -> None:
        """Announce new weights; `settle` waits until they are taken."""
        assert weights.updates is not None
        self.newest, self._verification = weights, None
        self.under_way = [
            self._send_to(index, update, weights) for index, update in enumerate(weights.updates)
        ]

    def _send_to(self, index: int, announced: WeightUpdate, weights: Weights) -> Delivery:
        with self._places[index]:  # no thread may ask for responses in between
            free = None if self.in_flight else self.submit(index, RolloutWorker.report)
            update = self.submit(index, RolloutWorker.update_and_check, announced, self.check_prompts)
            return Delivery(free, update, weights)

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
        return self._noted([difference for difference in verified if difference is not None])

    def _noted(self, differences: Sequence[float]) -> float:
        """The largest of them; that of the update before, where all engines have died since."""
        if differences:
            self.difference = max(differences)
        return self.difference

    def _verified(self, delivery: Delivery) -> float | None:
        name, weights = engine_name(delivery.update.index), delivery.weights
        if delivery.free is not None:
            self.result(delivery.free)
        try:
            found = self.result(delivery.update, self.timeout)
        except Overdue as error:
            raise WeightUpdateError(
                f"{name}: weight update {weights.version} did not end within {self.timeout:g} s "
                "(rollout.update_timeout)"
            ) from error
        if isinstance(found, Died):
            return None  # its successor has been given the newest weights, and they were verified
        return self._compared(delivery.update.index, *found, weights)

    def _compared(self, index: int, version: int, logps: npt.NDArray[np.float32], weights: Weights) -> float:
        name = engine_name(index)
        if version != weights.version:
            raise WeightUpdateError(f"{name} has weights of version {version} after update {weights.version}")
        if problem := self._check.problem(index, version, logps, weights.logps):
            raise WeightUpdateError(f"{name}: after weight update {version} {problem}")
        return mean_difference(logps, weights.logps)

    def prepare(self, index: int) -> None:
        super().prepare(index)
        if (weights := self.newest) is not None:
            if weights.updates is None:
                assert self.write_again is not None
                weights = self.newest = self.write_again(weights)
            assert weights.updates is not None
            engine = self.group.within(self.timeout)
            found = engine.call_on(
                index, RolloutWorker.update_and_check, weights.updates[index], self.check_prompts
            )
            self._compared(index, *found, weights)


def engine_name(index: int) -> str:
    return f"rollout engine {index}"


# Workers keep the limit of an update themselves, and know why it failed: they are heard first.
LEEWAY = 10.0


class Source(NamedTuple):
    """Whose file an engine reads: that of a rank on its machine or, where there is none, of a relay."""

    rank: int
    relay: int | None = None


@dataclass
class Relays:
    """From the updates that ranks wrote to the one that each engine finds on its own machine."""

    ranks: WorkerGroup[PolicyRank]
    group: Replaceable[Relay]
    sources: Sequence[Source]
    """Whose file each engine reads."""
    host: str

    def spread(self, updates: Sequence[WeightUpdate | None], timeout: float) -> list[WeightUpdate]:
        """The update for each engine, from what each rank has written."""
        written = {rank: update for rank, update in enumerate(updates) if update is not None}
        if len(digests := {update.digest for update in written.values()}) > 1:
            ranks = ", ".join(map(str, written))
            raise WeightUpdateError(f"ranks {ranks} gathered {len(digests)} different copies of the weights")
        files = self._send(written[0], timeout) if len(self.group) else []
        return [
            written[source.rank] if source.relay is None else files[source.relay] for source in self.sources
        ]

    def _send(self, update: WeightUpdate, timeout: float) -> list[WeightUpdate]:
        self.group.on_all(Relay.start, timeout)  # one that has died since is replaced here
        announced = self.ranks.within(timeout).call_on(
            0, PolicyRank.announce, update.version, self.host, len(self.group), timeout
        )
        relays = self.group.group
        pending: list[tuple[WorkerGroup[Any], Call[Any]]] = [
            (relays, call) for call in relays.submit(Relay.take, announced, timeout)
        ]
        pending.append((self.ranks, self.ranks.submit_to(0, PolicyRank.relay, update)))
        files: dict[int, WeightUpdate] = {}
        # They have this limit themselves: only a dead one takes longer.
        deadline = time.monotonic() + timeout + LEEWAY
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


def relay_members(placement: Placement, environment: Mapping[str, str]) -> list[Member]:
    """One relay for each machine that has an engine but no rank."""
    return [
        Member((f"weight relay {number}",), environment, seat)
        for number, seat in enumerate(_away(placement).values())
    ]


def weight_sources(placement: Placement) -> list[Source]:
    """Of each engine. What relays have comes from rank 0."""
    first = _first_ranks(placement)
    away = list(_away(placement))
    return [
        Source(first[seat.node]) if seat.node in first else Source(0, away.index(seat.node))
        for seat in placement.engines
    ]


def _away(placement: Placement) -> dict[str, Seat]:
    """Machines without a rank, each with the first of its engines."""
    home = _first_ranks(placement)
    return {seat.node: seat for seat in reversed(placement.engines) if seat.node not in home}


def _first_ranks(placement: Placement) -> dict[str, int]:
    return {seat.node: rank for rank, seat in reversed(list(enumerate(placement.ranks)))}
