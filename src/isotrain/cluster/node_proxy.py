"""A worker on each machine that passes calls on to the ranks there, so that the controller calls machines.

Where machines are many, some proxies lead others: the controller calls about the square root of their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isotrain.cluster.failures import explain, overdue
from isotrain.cluster.host import Location
from isotrain.cluster.waiting import GRACE, Watch, cause_of, gather
from isotrain.errors import IsotrainError

# So many proxies the controller calls itself.
FLAT = 16
# Seconds: a proxy replies so much later than its ranks would, at most.
LEEWAY = 2 * GRACE


@dataclass(frozen=True)
class LedProxy:
    """A proxy that another one leads."""

    number: int
    host: Any = field(compare=False)
    place: Location | None
    ranks: tuple[int, ...]


class NodeProxy:
    """`hosts` are the actors of its ranks, by the rank's number; `name` is what the ranks are called."""

    def __init__(self, name: str, hosts: Mapping[int, Any], places: Mapping[int, Location]) -> None:
        self.name, self.hosts, self.places = name, hosts, places
        self.others: Sequence[LedProxy] = ()

    def lead(self, others: Sequence[LedProxy]) -> None:
        """Pass calls on to these proxies as well."""
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
        calls: dict[Any, int | LedProxy] = {
            other.host.run.remote("run", method, {i: args[i] for i in other.ranks}, kwargs, timeout): other
            for other in self.others
        }
        for index, host in self.hosts.items():
            calls[host.run.remote(method, *args[index], **kwargs)] = index
        gathered = gather(
            calls,
            lambda called, error: self._explain(called, method, error),
            Watch(),
            None if timeout is None else timeout + (LEEWAY if self.others else 0.0),
            grace=LEEWAY if self.others else GRACE,
        )
        if gathered.failures:
            raise cause_of(gathered.failures)
        if gathered.late:
            raise overdue(self.name, method, timeout, self._late(gathered.late))
        replies = dict[int, Any]()
        for called, value in gathered.values.items():
            replies.update(value if isinstance(called, LedProxy) else {called: value})
        return replies

    def _explain(self, called: int | LedProxy, method: str, error: Exception) -> IsotrainError:
        if isinstance(called, LedProxy):
            return explain(error, proxy_name(self.name), called.number, method, called.place)
        return explain(error, self.name, called, method, self.places[called])

    def _late(self, called: Sequence[int | LedProxy]) -> dict[int, Location | None]:
        late: dict[int, Location | None] = {}
        for callee in called:
            late.update(
                dict.fromkeys(callee.ranks, callee.place)
                if isinstance(callee, LedProxy)
                else {callee: self.places[callee]}
            )
        return late


def proxy_name(name: str) -> str:
    return f"agent of {name}s"


def machines_of(nodes: Sequence[str]) -> list[list[int]]:
    """Numbers of the workers of each machine, from the machine of each worker."""
    machines: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        machines.setdefault(node, []).append(index)
    return list(machines.values())


def teams(proxies: int) -> list[list[int]]:
    """Proxies that are called together; the first of each team leads the others."""
    size = 1 if proxies <= FLAT else math.isqrt(proxies - 1) + 1
    return [list(range(first, min(first + size, proxies))) for first in range(0, proxies, size)]
