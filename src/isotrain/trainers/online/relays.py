"""Send weights to machines without rank 0: each receives them once, for all its engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isotrain.cluster.failures import WorkerDied
from isotrain.cluster.placement import Placement, Seat
from isotrain.cluster.workers import Call, Member, WorkerGroup, wait_any
from isotrain.errors import WeightUpdateError
from isotrain.rollout.base import WeightUpdate
from isotrain.rollout.broadcast import receive_update
from isotrain.rollout.transfer import remove_private_directory, write_update
from isotrain.trainers.online.policy_rank import PolicyRank
from isotrain.trainers.online.replaceable import Replaceable

LEEWAY = 10.0


class Relay:
    """On one machine: from the collective into a file in shared memory, which its engines can read again."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name, self.timeout = name, timeout

    def start(self) -> None:
        """It has nothing to make ready, and so can be replaced at any time between two updates."""

    def take(self, announced: WeightUpdate) -> WeightUpdate:
        return write_update(receive_update(announced, self.name, self.timeout), announced.version)

    def close(self) -> None:
        remove_private_directory()


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
