"""New weights from the ranks' device memory straight into the engines', while neither does anything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from isotrain.cluster.background import in_background
from isotrain.cluster.failures import WorkerDied
from isotrain.cluster.placement import Placement
from isotrain.cluster.replaceable import Died
from isotrain.cluster.workers import WorkerGroup
from isotrain.errors import WorkerLost
from isotrain.rollout.base import WeightUpdate
from isotrain.rollout.broadcast import REHEARSAL
from isotrain.rollout.carriers import Way
from isotrain.trainers.online.messages import StreamEnd
from isotrain.trainers.online.policy_rank import PolicyRank
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.trainers.online.weights import LEEWAY, Engines, Relays, Weights

# A first connection between devices takes a while.
REHEARSAL_SECONDS = 60.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Routes:
    """From which rank each worker of each engine takes its weights."""

    way: Way
    ranks: tuple[tuple[int, ...], ...]
    """By engine, of its workers in their order; one alone is that of all of them."""
    receivers: tuple[int, ...]
    """By rank: how many workers take its weights."""
    hosts: tuple[str, ...]
    """By rank: the address on which it listens for them."""


def routes(placement: Placement, tensor_parallel: int) -> Routes:
    """Engines on the ranks' devices read the memory of the rank there; to others, rank 0 sends."""
    at = {(seat.node, number): rank for rank, seat in enumerate(placement.ranks) for number in seat.devices}
    beside = [[at.get((seat.node, number)) for number in seat.devices] for seat in placement.engines]
    hosts = tuple(seat.host for seat in placement.ranks)
    if all(rank is not None for ranks in beside for rank in ranks):
        taken = tuple(tuple(rank for rank in ranks if rank is not None) for ranks in beside)
        counts = Counter(rank for ranks in taken for rank in ranks)
        receivers = tuple(counts[rank] for rank in range(len(hosts)))
        return Routes("shared", taken, receivers, (LOOPBACK,) * len(hosts))
    workers = len(placement.engines) * tensor_parallel
    return Routes("collective", ((0,),) * len(placement.engines), (workers, *[0] * (len(hosts) - 1)), hosts)


@dataclass
class Streams:
    ranks: WorkerGroup[PolicyRank]
    engines: Engines
    relays: Relays
    """For an engine that is replaced: it comes too late for what was sent, and reads a file."""
    routes: Routes
    colocated: bool
    """Whether ranks and engines use the same device memory one after the other."""

    def rehearse(self) -> str:
        """Whether it works here at all: drivers may be too old, networks closed; returns the error if not."""
        limit = min(REHEARSAL_SECONDS, self.engines.timeout)
        announced = self.ranks.within(limit).call_each(
            PolicyRank.open_rehearsal, self._ends(REHEARSAL, limit)
        )
        errors = [found for found in announced if isinstance(found, str)]
        if not errors:
            errors = self._rehearse([found for found in announced if not isinstance(found, str)], limit)
        error = next(filter(None, errors), "")
        if error:
            self.ranks.call(PolicyRank.close_stream)
        return error

    def _rehearse(self, announced: Sequence[WeightUpdate | None], limit: float) -> list[str]:
        """Both sides keep the limit themselves; an engine that dies of it is replaced."""
        patience = limit + LEEWAY
        sending = in_background(lambda: self.ranks.within(patience).call(PolicyRank.rehearse))
        taking = [
            self.engines.submit(index, RolloutWorker.rehearse, update, limit)
            for index, update in enumerate(self._updates(announced))
        ]
        told: list[str] = []
        for task in taking:
            error = self.engines.result(task, patience)
            told.append("an engine died of it" if isinstance(error, Died) else error)
        return [*told, *sending.result()]

    def send(self, version: int) -> float:
        """Returns the weight check's largest difference.

        Colocated, the ranks keep only what they send, the engines wake up without a cache, and get the
        rest of the device when the ranks are gone from it.
        """
        limit = self.engines.timeout
        opened = self.ranks.within(limit).call_each(PolicyRank.open_stream, self._ends(version, limit))
        logps = next(found.logps for found in opened if found is not None)
        with _all_or_none():
            if self.colocated:
                self.engines.group.within(limit).call(RolloutWorker.wake_for_weights)
            self._transfer(version, self._updates([found and found.update for found in opened]))
        # From here on, an engine that dies gets these from a file.
        self.engines.newest = Weights(version, None, logps)
        if self.colocated:
            self.engines.on_all(RolloutWorker.wake, limit)
        return self.engines.verify()

    def _ends(self, version: int, timeout: float) -> list[StreamEnd]:
        """For each rank."""
        way, prompts = self.routes.way, self.engines.check_prompts
        return [
            StreamEnd(version, prompts, way, host, receivers, timeout, self.colocated)
            for host, receivers in zip(self.routes.hosts, self.routes.receivers, strict=True)
        ]

    def _updates(self, announced: Sequence[WeightUpdate | None]) -> list[WeightUpdate]:
        """What each engine is told: the addresses of its workers' senders."""
        at = {rank: update for rank, update in enumerate(announced) if update is not None}
        return [
            replace(at[ranks[0]], address=",".join(at[rank].address for rank in ranks))
            for ranks in self.routes.ranks
        ]

    def _transfer(self, version: int, updates: Sequence[WeightUpdate]) -> None:
        """Both sides at once: each has the limit itself, and the one that fails first knows why."""
        patience = self.engines.timeout + LEEWAY
        sending = in_background(
            lambda: self.ranks.within(patience).call(PolicyRank.stream, version, self.colocated)
        )
        group = self.engines.group
        group.results(group.submit_each(RolloutWorker.update, updates), patience)
        sending.result()

    def write(self, weights: Weights) -> Weights:
        """The same weights once more, in files that can be read at any time."""
        limit = self.engines.timeout
        written = self.ranks.within(limit).call(PolicyRank.write_again, weights.version)
        return weights._replace(updates=self.relays.spread(written, limit))


@contextmanager
def _all_or_none() -> Iterator[None]:
    """An engine that is replaced within would come too late for what is being sent to all of them."""
    try:
        yield
    except WorkerDied as death:
        raise WorkerLost(f"{death}\nit died in a weight update, which all engines take together") from death
