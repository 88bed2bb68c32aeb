"""Weights to machines where no rank wrote them: each receives them once, for all engines that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isotrain.cluster.placement import Placement, Seat
from isotrain.cluster.workers import Member, WorkerGroup
from isotrain.rollout.broadcast import receive_update
from isotrain.rollout.transfer import write_update
from isotrain.rollout.update import WeightUpdate


class Relay:
    """On one machine: from the collective into a file in shared memory, which its engines can read again."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name, self.timeout = name, timeout

    def take(self, announced: WeightUpdate) -> WeightUpdate:
        return write_update(receive_update(announced, self.name, self.timeout), announced.version)


@dataclass
class Relays:
    """From the update that rank 0 wrote to the one that each engine finds on its own machine."""

    ranks: WorkerGroup
    group: WorkerGroup | None
    of_engine: Sequence[int | None]
    """Which relay's file an engine reads; None for that of rank 0."""
    host: str
    timeout: float

    def spread(self, update: WeightUpdate) -> list[WeightUpdate]:
        """The update for each engine."""
        files: list[WeightUpdate] = []
        if self.group is not None:
            announced = self.ranks.call_on(
                0, "announce", update.version, self.host, len(self.group), self.timeout
            )
            taking = self.group.submit("take", announced)
            self.ranks.call_on(0, "relay", update)
            files = self.group.results(taking, self.timeout)
        return [update if relay is None else files[relay] for relay in self.of_engine]


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
