"""A worker on each machine that passes calls on to the ranks there, so that the controller calls machines.

Where machines are many, some agents lead others: the controller calls about the square root of their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isotrain.cluster.failures import explain, overdue
from isotrain.cluster.host import Whereabouts
from isotrain.cluster.waiting import GRACE, Watch, cause_of, gather
from isotrain.errors import IsotrainError

# So many agents the controller calls itself.
FLAT = 16
# Seconds: an agent replies so much later than its ranks would, at most.
LEEWAY = 2 * GRACE


@dataclass(frozen=True)
class Led:
    """An agent that another one leads."""

    number: int
    host: Any = field(compare=False)
    place: Whereabouts | None
    ranks: tuple[int, ...]


class Agent:
    """`hosts` are the actors of its ranks, by the rank's number; `name` is what the ranks are called."""

    def __init__(self, name: str, hosts: Mapping[int, Any], places: Mapping[int, Whereabouts]) -> None:
        self.name, self.hosts, self.places = name, hosts, places
        self.others: Sequence[Led] = ()

    def lead(self, others: Sequence[Led]) -> None:
        """Pass calls on to these agents as well."""
        self.others = others

    def run(
        self,
        method: str,
        args: Mapping[int, tuple[Any, ...]],
        kwargs: Mapping[str, Any],
        timeout: float | None,
    ) -> dict[int, Any]:
        """Run a method on every rank, each with its own `args`; results by rank.

        Where ranks fail, raises the failure that most likely caused the others of this machine.
        """
        calls: dict[Any, int | Led] = {
            other.host.run.remote("run", method, {i: args[i] for i in other.ranks}, kwargs, timeout): other
            for other in self.others
        }
        for index, host in self.hosts.items():
            calls[host.run.remote(method, *args[index], **kwargs)] = index
        found = gather(
            calls,
            lambda called, error: self._explain(called, method, error),
            Watch(),
            None if timeout is None else timeout + (LEEWAY if self.others else 0.0),
            grace=LEEWAY if self.others else GRACE,
        )
        if found.failures:
            raise cause_of(found.failures)
        if found.late:
            raise overdue(self.name, method, timeout, self._late(found.late))
        replies = dict[int, Any]()
        for called, value in found.values.items():
            replies.update(value if isinstance(called, Led) else {called: value})
        return replies

    def _explain(self, called: int | Led, method: str, error: Exception) -> IsotrainError:
        if isinstance(called, Led):
            return explain(error, agent_name(self.name), called.number, method, called.place)
        return explain(error, self.name, called, method, self.places[called])

    def _late(self, called: Sequence[int | Led]) -> dict[int, Whereabouts | None]:
        late: dict[int, Whereabouts | None] = {}
        for one in called:
            late.update(
                dict.fromkeys(one.ranks, one.place) if isinstance(one, Led) else {one: self.places[one]}
            )
        return late


def agent_name(name: str) -> str:
    return f"agent of {name}s"


def machines_of(nodes: Sequence[str]) -> list[list[int]]:
    """Numbers of the workers of each machine, from the machine of each worker."""
    machines: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        machines.setdefault(node, []).append(index)
    return list(machines.values())


def teams(agents: int) -> list[list[int]]:
    """Agents that are called together; the first of each team leads the others."""
    size = 1 if agents <= FLAT else math.isqrt(agents - 1) + 1
    return [list(range(first, min(first + size, agents))) for first in range(0, agents, size)]
