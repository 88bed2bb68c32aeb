"""Weight updates as the controller sees them: which transport, from whom to whom, and that they arrived.

The ranks' part is `weights/send.py`, the engines' part `weights/transport.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from isotrain.children import in_background
from isotrain.cluster.failures import WorkerDied
from isotrain.cluster.placement import Placement
from isotrain.cluster.replaceable import Died, Replaceable, WorkerTask
from isotrain.cluster.workers import WorkerCall, WorkerGroup, wait_any
from isotrain.errors import WeightUpdateError, WorkerLost
from isotrain.trainers.online.engines import Engines, Weights
from isotrain.trainers.online.policy_rank import PolicyRank
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.weights.file import Relay
from isotrain.weights.send import SendOrder
from isotrain.weights.stream import give_up
from isotrain.weights.transport import TRANSPORTS
from isotrain.weights.update import REHEARSAL, Routes, StoreSource, WeightUpdate

# A first connection between devices takes a while.
REHEARSAL_SECONDS = 60.0
# Workers keep the limit of an update themselves, and know why it failed: they are heard first.
LEEWAY = 10.0


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
    ahead: bool = False
    """Whether engines generate while ranks learn, and so while weights are sent."""
    tell: Callable[[str], None] = print
    """Shows warnings."""

    def __post_init__(self) -> None:
        self.routes = self.possible[-1]
        self.engines.write_again = self._write_again
        self._failed = False

    @property
    def together(self) -> bool:
        """Whether engines take weights while they are sent."""
        return TRANSPORTS[self.routes.transport].together

    @property
    def route(self) -> str:
        """For people, and to be recorded."""
        return self.routes.transport + (" to a second buffer" if self.together and self.ahead else "")

    def choose(self) -> None:
        """Take the best transport that works here: drivers may be too old, networks closed."""
        for routes in self.possible:
            self.routes = routes
            error = self._rehearse() if self.together else ""
            if not error:
                return
            self.ranks.call(PolicyRank.close_senders)
            self.tell(
                "warning: weights go through host memory, which takes longer: they cannot be sent from "
                f"device to device ({error}); rollout.weight_transfer: file does not try it"
            )

    def send(self, version: int, wait: bool) -> float:
        """The policy's weights to all engines; returns the weight check's largest difference.

        Without `wait`, engines that can read them later do so when they get to it, and the difference is that
        of the update before.
        """
        if self.together and not self.ahead:
            return self._send_together(version)
        # The second buffers, or the files of the last update but one, are about to be used again.
        difference = self.engines.settle()
        if not (self.together and self._send_to_buffers(version)):
            self._send_files(version)
        return self.engines.settle() if wait else difference

    def _send_files(self, version: int) -> None:
        limit, prompts = self.engines.timeout, self.engines.check_prompts
        files = self.possible[-1]
        orders = self._orders(files, version, limit, prompts, self.colocated)
        sent = self.ranks.within(limit).call_each(PolicyRank.send_weights, orders)
        logps = next(reply.logps for reply in sent if reply.logps is not None)
        if self.colocated:
            self.engines.on_all(RolloutWorker.wake, limit)
        updates = self._updates(files, [reply.update for reply in sent])
        self.engines.send(Weights(version, updates, logps))

    def _send_to_buffers(self, version: int) -> bool:
        """While the engines generate; the ranks wait, and so do not change what is being sent.

        Returns whether all engines have it. Those that do not are as they were before, and the ranks still
        have this version.
        """
        limit, prompts = self.engines.timeout, self.engines.check_prompts
        orders = self._orders(self.routes, version, limit, prompts)
        announced = self.ranks.within(limit).call_each(PolicyRank.announce_weights, orders)
        if error := next((reply.error for reply in announced if reply.error), ""):
            return self._write_instead(version, error)
        logps = next(reply.logps for reply in announced if reply.logps is not None)
        updates = self._updates(self.routes, [reply.update for reply in announced])
        orders = [replace(order, buffered=True, check_prompts=None) for order in orders]
        # Ranks gather what is left, also of an update that has failed.
        patience, of_ranks = limit + LEEWAY, 2 * limit + LEEWAY
        # First: an engine that is being replaced may have to get weights from the ranks.
        taking = [
            self.engines.submit_beside(index, RolloutWorker.receive, update, limit)
            for index, update in enumerate(updates)
        ]
        sending = in_background(
            lambda: self.ranks.within(of_ranks).call_each(PolicyRank.send_weights, orders)
        )
        died, errors = self._wait_for_buffers(version, updates, taking, patience)
        replies = sending.result()
        errors += [reply.error for reply in replies if reply.error]
        for task, death in died:
            self.engines.replace(task, death)
        if died:  # its successor has them from a file, and so do the others
            return False
        if errors:
            return self._write_instead(version, errors[0])
        sent = next(reply.update for reply in replies if reply.update is not None)
        updates = [
            replace(update, tensors=sent.tensors, bytes=sent.bytes, digest=sent.digest) for update in updates
        ]
        # From here on, an engine that dies gets them from a file.
        self.engines.send(Weights(version, None, logps), updates, taking)
        self._failed = False
        return True

    def _wait_for_buffers(
        self,
        version: int,
        updates: Sequence[WeightUpdate],
        taking: Sequence[WorkerTask[WorkerCall[None]]],
        patience: float,
    ) -> tuple[list[tuple[WorkerTask[WorkerCall[None]], WorkerDied]], list[str]]:
        """Engines that have died meanwhile, and errors; after the first, nobody waits for the others."""
        died: list[tuple[WorkerTask[WorkerCall[None]], WorkerDied]] = []
        errors: list[str] = []
        group, pending, deadline = self.engines.group, list(taking), time.monotonic() + patience
        while pending:
            ready = wait_any(group.watch, [task.work for task in pending], deadline)
            if not ready:
                errors.append(f"no end within {patience:g} s")
                pending.clear()
            for task in [pending.pop(number) for number in reversed(ready)]:
                try:
                    group.results([task.work])
                except WorkerDied as death:
                    died.append((task, death))
                except WeightUpdateError as error:
                    errors.append(str(error))
            if died or errors:
                reason = str(died[0][1]).splitlines()[0] if died else errors[0]
                for source in {source for update in updates for source in update.sources}:
                    assert isinstance(source, StoreSource)
                    give_up(source, version, reason)
        return died, errors

    def _write_instead(self, version: int, error: str) -> bool:
        """Files for this update; for all later ones as well where the update before has failed too."""
        later = " and all later ones go" if self._failed else " goes"
        self.tell(
            f"warning: weight update {version} could not be sent from device to device ({error}); "
            f"it{later} through host memory, which takes longer"
        )
        if self._failed:
            self.routes = self.possible[-1]
        self._failed = True
        return False

    def send_again(self) -> None:
        """The newest weights to engines that have slept, and lost them by it."""
        newest = self.engines.newest
        assert newest is not None
        if self.together:  # colocated, and so not ahead
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
        """For an engine that came too late for what was sent: what the ranks have now, in files.

        Ranks that wait for responses have the same version still. Those that learn do so from a whole batch:
        nobody needs the lost responses before they are done, and have the version that is sent next.
        """
        limit, files = self.engines.timeout, self.possible[-1]
        prompts = self.engines.check_prompts if self.ahead else None
        orders = self._orders(files, weights.version, limit, prompts)
        written = self.ranks.within(limit).call_each(PolicyRank.write_weights, orders)
        updates = self._updates(files, [reply.update for reply in written])
        logps = next((reply.logps for reply in written if reply.logps is not None), weights.logps)
        return Weights(updates[0].version, updates, logps)

    def _rehearse(self) -> str:
        """Both sides keep the limit themselves; an engine that dies of it is replaced. Returns the error."""
        limit = min(REHEARSAL_SECONDS, self.engines.timeout)
        orders = self._orders(self.routes, REHEARSAL, limit)
        orders = [replace(order, buffered=self.ahead) for order in orders]
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
        copies: list[WeightUpdate] = []
        if routes.relays:
            with self.ranks.in_turn():
                copies = self._relay(at[0], routes.hosts[0])
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
