"""Weight updates as the controller sees them: which transport, from whom to whom, and that they arrived.

The ranks' part is `weights/send.py`, the engines' part `weights/transport.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isotrain.children import in_background
from isotrain.cluster.failures import Overdue, WorkerDied
from isotrain.cluster.placement import Placement
from isotrain.cluster.replaceable import Died, Replaceable, WorkerTask
from isotrain.cluster.workers import WorkerCall, WorkerGroup, wait_any
from isotrain.errors import WeightUpdateError, WorkerLost
from isotrain.trainers.online.policy_rank import PolicyRank
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.weights.check import Tolerance, WeightCheck, mean_difference
from isotrain.weights.file import Relay
from isotrain.weights.send import SendOrder
from isotrain.weights.transport import TRANSPORTS
from isotrain.weights.update import REHEARSAL, Routes, WeightUpdate

# A first connection between devices takes a while.
REHEARSAL_SECONDS = 60.0
# Workers keep the limit of an update themselves, and know why it failed: they are heard first.
LEEWAY = 10.0


class Weights(NamedTuple):
    version: int
    updates: list[WeightUpdate] | None
    """Where each engine finds them; None where they were sent and are nowhere to be found again."""
    logps: npt.NDArray[np.float32]
    """The trained model's log-probs of the prompts of the weight check, with these weights."""


@dataclass(frozen=True)
class Delivery:
    """Weights on their way to one engine."""

    free: WorkerTask[WorkerCall[None]] | None
    """Done when the engine has finished its earlier calls; in flight, they are not waited for."""
    update: WorkerTask[WorkerCall[tuple[int, npt.NDArray[np.float32]]]]
    weights: Weights


class Engines(Replaceable[RolloutWorker]):
    """Updates are queued behind what an engine is doing, or come between its tokens; every one is verified.

    The engine itself compares what it got with the update's digest. Here its version is compared, and its
    log-probs of fixed prompts with those of the trained model (weights/check.py), which shows that the
    weights also mean the same. Earlier calls of an engine may take any time: the timeout of an update begins
    after them, or at once where updates are `in_flight`.
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
        """The verification of updates under way, once somebody waits for it."""
        self.difference = 0.0
        """The weight check's difference at the update that was verified last."""
        self.write_again: Callable[[Weights], Weights] | None = None
        """Writes weights that were sent to where they can be found."""

    def verify(self) -> float:
        """Check that all engines have the newest weights; returns the largest difference."""
        weights, differences = self.newest, []
        assert weights is not None
        method = RolloutWorker.version_and_check
        for task in [self.submit(index, method, self.check_prompts) for index in range(len(self))]:
            check = self.result(task, self.timeout)
            if not isinstance(check, Died):  # a successor was verified when it was given them
                differences.append(self._compared(task.index, *check, weights))
        return self._noted(differences)

    @property
    def first_version(self) -> int:
        """The version that responses must begin with from now on; 0 where calls keep their order anyway."""
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
        """A future of what `settle` returns or raises."""
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
            check = self.result(delivery.update, self.timeout)
        except Overdue as error:
            raise WeightUpdateError(
                f"{name}: weight update {weights.version} did not end within {self.timeout:g} s "
                "(rollout.update_timeout)"
            ) from error
        if isinstance(check, Died):
            return None  # its successor has been given the newest weights, and they were verified
        return self._compared(delivery.update.index, *check, weights)

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
            check = engine.call_on(
                index, RolloutWorker.update_and_check, weights.updates[index], self.check_prompts
            )
            self._compared(index, *check, weights)


def engine_name(index: int) -> str:
    return f"rollout engine {index}"


def possible_routes(placement: Placement, tensor_parallel: int, *, together: bool) -> list[Routes]:
    """Best first; the last works everywhere. `together`: whether engines can take weights as they come."""
    routes_by_transport = [
        transport.routes(placement, tensor_parallel)
        for transport in TRANSPORTS.values()
        if together or not transport.together
    ]
    return [routes for routes in routes_by_transport if routes is not None]


@dataclass
class WeightSync:
    """Sends each version from the ranks to all engines."""

    ranks: WorkerGroup[PolicyRank]
    engines: Engines
    relays: Replaceable[Relay]
    possible: Sequence[Routes]
    """Best first; the last works everywhere."""
    colocated: bool
    """Whether ranks and engines use the same device memory one after the other."""

    def __post_init__(self) -> None:
        self.routes = self.possible[-1]
        self.engines.write_again = self._write_again

    @property
    def together(self) -> bool:
        """Whether engines take weights while they are sent."""
        return TRANSPORTS[self.routes.transport].together

    def choose(self, tell: Callable[[str], None]) -> None:
        """Take the best transport that works here: drivers may be too old, networks closed."""
        for routes in self.possible:
            self.routes = routes
            error = self._rehearse() if self.together else ""
            if not error:
                return
            self.ranks.call(PolicyRank.close_senders)
            tell(
                "warning: weights go through host memory, which takes longer: they cannot be sent from "
                f"device to device ({error}); rollout.weight_transfer: file does not try it"
            )

    def send(self, version: int, wait: bool) -> float:
        """The policy's weights to all engines; returns the weight check's largest difference.

        Without `wait`, engines that can read them later do so when they get to it, and the difference is that
        of the update before.
        """
        if self.together:
            return self._send_together(version)
        difference = self.engines.settle()  # the files of the last update but one are about to be reused
        limit, prompts = self.engines.timeout, self.engines.check_prompts
        orders = self._orders(self.routes, version, limit, prompts, self.colocated)
        sent = self.ranks.within(limit).call_each(PolicyRank.send_weights, orders)
        logps = next(reply.logps for reply in sent if reply.logps is not None)
        if self.colocated:
            self.engines.on_all(RolloutWorker.wake, limit)
        updates = self._updates(self.routes, [reply.update for reply in sent])
        self.engines.send(Weights(version, updates, logps))
        return self.engines.settle() if wait else difference

    def send_again(self) -> None:
        """The newest weights to engines that have slept, and lost them by it."""
        newest = self.engines.newest
        assert newest is not None
        if self.together:
            self._send_together(newest.version)
            return
        self.engines.on_all(RolloutWorker.wake, self.engines.timeout)
        self.engines.send(newest)
        self.engines.settle()

    def _send_together(self, version: int) -> float:
        """While neither side does anything else.

        Colocated, the ranks keep only what they send, the engines wake up without a cache, and get the
        rest of the device when the ranks are gone from it.
        """
        limit, prompts = self.engines.timeout, self.engines.check_prompts
        orders = self._orders(self.routes, version, limit, prompts, self.colocated)
        announced = self.ranks.within(limit).call_each(PolicyRank.announce_weights, orders)
        if error := next((reply.error for reply in announced if reply.error), ""):
            raise WeightUpdateError(f"weight update {version}: {error}")
        logps = next(reply.logps for reply in announced if reply.logps is not None)
        updates = self._updates(self.routes, [reply.update for reply in announced])
        with _all_or_none():
            if self.colocated:
                self.engines.group.within(limit).call(RolloutWorker.wake_for_weights)
            # Each side has the limit itself, and the one that fails first knows why.
            patience = limit + LEEWAY
            orders = self._orders(self.routes, version, limit, None, self.colocated)
            sending = in_background(
                lambda: self.ranks.within(patience).call_each(PolicyRank.send_weights, orders)
            )
            group = self.engines.group
            group.results(group.submit_each(RolloutWorker.update, updates), patience)
            sending.result()
        # From here on, an engine that dies gets these from a file.
        self.engines.newest = Weights(version, None, logps)
        if self.colocated:
            self.engines.on_all(RolloutWorker.wake, limit)
        return self.engines.verify()

    def _write_again(self, weights: Weights) -> Weights:
        """For an engine that came too late for what was sent: the same weights in files."""
        limit, files = self.engines.timeout, self.possible[-1]
        orders = self._orders(files, weights.version, limit)
        written = self.ranks.within(limit).call_each(PolicyRank.send_weights, orders)
        return weights._replace(updates=self._updates(files, [reply.update for reply in written]))

    def _rehearse(self) -> str:
        """Both sides keep the limit themselves; an engine that dies of it is replaced. Returns the error."""
        limit = min(REHEARSAL_SECONDS, self.engines.timeout)
        orders = self._orders(self.routes, REHEARSAL, limit)
        announced = self.ranks.within(limit).call_each(PolicyRank.announce_weights, orders)
        if error := next((reply.error for reply in announced if reply.error), ""):
            return error
        patience = limit + LEEWAY
        sending = in_background(
            lambda: self.ranks.within(patience).call_each(PolicyRank.send_weights, orders)
        )
        taking = [
            self.engines.submit(index, RolloutWorker.rehearse, update, limit)
            for index, update in enumerate(self._updates(self.routes, [reply.update for reply in announced]))
        ]
        errors: list[str] = []
        for task in taking:
            reply = self.engines.result(task, patience)
            errors.append("an engine died of it" if isinstance(reply, Died) else reply)
        return next(filter(None, [*errors, *(reply.error for reply in sending.result())]), "")

    def _orders(
        self,
        routes: Routes,
        version: int,
        timeout: float,
        check_prompts: Sequence[npt.NDArray[np.int32]] | None = None,
        offloads: bool = False,
    ) -> list[SendOrder]:
        """For each rank."""
        return [
            SendOrder(version, routes.transport, host, receivers, timeout, check_prompts, offloads)
            for host, receivers in zip(routes.hosts, routes.receivers, strict=True)
        ]

    def _updates(self, routes: Routes, of_ranks: Sequence[WeightUpdate | None]) -> list[WeightUpdate]:
        """The update of each engine: where its workers take the weights."""
        at = {rank: update for rank, update in enumerate(of_ranks) if update is not None}
        if len(digests := {update.digest for update in at.values()}) > 1:
            ranks = ", ".join(map(str, at))
            raise WeightUpdateError(f"ranks {ranks} gathered {len(digests)} different copies of the weights")
        copies = self._relay(at[0], routes.hosts[0]) if routes.relays else []
        return [
            copies[routes.relays[engine]]
            if engine in routes.relays
            else replace(at[ranks[0]], sources=tuple(s for rank in ranks for s in at[rank].sources))
            for engine, ranks in enumerate(routes.ranks)
        ]

    def _relay(self, update: WeightUpdate, host: str) -> list[WeightUpdate]:
        """From the file of rank 0 to one on each machine without a rank."""
        version, timeout = update.version, self.engines.timeout
        self.relays.on_all(Relay.start, timeout)  # one that has died since is replaced here
        order = SendOrder(version, "broadcast", host, len(self.relays), timeout, written=update)
        announced = self.ranks.within(timeout).call_on(0, PolicyRank.announce_weights, order)
        if announced.update is None:
            raise WeightUpdateError(f"weight update {version}: {announced.error}")
        relays = self.relays.group
        pending: list[tuple[WorkerGroup[Any], WorkerCall[Any]]] = [
            (relays, call) for call in relays.submit(Relay.take, announced.update, timeout)
        ]
        pending.append((self.ranks, self.ranks.submit_to(0, PolicyRank.send_weights, order)))
        copies: dict[int, WeightUpdate] = {}
        # They have this limit themselves: only a dead one takes longer.
        deadline = time.monotonic() + timeout + LEEWAY
        # Together: both sides wait for each other, and the first that fails knows why.
        while pending:
            ready = wait_any(relays.watch, [call for _, call in pending], deadline)
            if not ready:
                raise WeightUpdateError(f"weight update {version} did not end{self._late(pending)}")
            for group, call in [pending.pop(number) for number in reversed(ready)]:
                try:
                    (value,) = group.results([call])
                except (WorkerDied, WeightUpdateError) as error:
                    raise WeightUpdateError(
                        f"weight update {version}: {error}{self._late(pending)}"
                    ) from error
                if group is relays:
                    copies[call.index] = value
        return [copies[index] for index in range(len(self.relays))]

    def _late(self, pending: Sequence[tuple[WorkerGroup[Any], WorkerCall[Any]]]) -> str:
        relays = self.relays.group
        places = dict(enumerate(relays.locations))
        late = [f"weight relay {c.index} on {places[c.index].host}" for g, c in pending if g is relays]
        return f"; waiting for {', '.join(late)}" if late else ""


@contextmanager
def _all_or_none() -> Iterator[None]:
    """An engine that is replaced within would come too late for what is being sent to all of them."""
    try:
        yield
    except WorkerDied as death:
        raise WorkerLost(f"{death}\nit died in a weight update, which all engines take together") from death
