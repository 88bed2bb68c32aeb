"""Which rank each engine takes weights from, by each transport; and calls that hang are given up in time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from isotrain.cluster.placement import Placement, Slot
from isotrain.trainers.online.weight_sync import possible_routes
from isotrain.weights.file import FileTransport, machines_without_ranks
from isotrain.weights.transport import error_within
from isotrain.weights.update import Routes, update_limit


def seats(*places: str) -> tuple[Slot, ...]:
    """Of `node`, or of `node:numbers` of devices."""
    anything: Any = None
    return tuple(
        Slot(anything, 0, place[0], f"host-{place[0]}", tuple(place[2:].split("+"))) for place in places
    )


def device_routes(placement: Placement, tensor_parallel: int) -> Routes:
    """The only ones besides those of files, which come last."""
    best, last = possible_routes(placement, tensor_parallel, together=True)
    assert [last] == possible_routes(placement, tensor_parallel, together=False)
    assert last.transport == "file"
    return best


def test_engines_on_the_devices_of_ranks_take_the_memory_of_each() -> None:
    ranks = seats("a:0", "a:1", "b:0", "b:1")
    routes = device_routes(Placement(ranks, seats("b:0+1", "a:0+1")), 2)
    assert (routes.transport, routes.ranks) == ("ipc", ((2, 3), (0, 1)))
    assert routes.receivers == (1, 1, 1, 1)
    assert set(routes.hosts) == {"127.0.0.1"}, "nobody else needs to reach them"
    fewer = device_routes(Placement(ranks, seats("a:1")), 1)
    assert (fewer.transport, fewer.ranks, fewer.receivers) == ("ipc", ((1,),), (0, 1, 0, 0))


def test_rank_0_sends_to_engines_elsewhere() -> None:
    routes = device_routes(Placement(seats("a:0", "a:1"), seats("a:2+3", "b:0+1")), 2)
    assert (routes.transport, routes.ranks, routes.receivers) == ("broadcast", ((0,), (0,)), (4, 0))
    assert routes.hosts == ("host-a", "host-a")


@pytest.mark.parametrize(
    ("ranks", "engines", "sources", "receivers", "relays", "machines"),
    [
        ("aabb", "aabb", (0, 0, 2, 2), (2, 0, 2, 0), {}, ""),
        ("aabb", "bb", (2, 2), (0, 0, 2, 0), {}, ""),
        ("aa", "bcb", (0, 0, 0), (3, 0), {0: 0, 1: 1, 2: 0}, "bc"),
        ("aab", "bc", (2, 0), (1, 0, 1), {1: 0}, "c"),
        ("a", "a", (0,), (1,), {}, ""),
        ("aa", "", (), (0, 0), {}, ""),
    ],
)
def test_files_are_those_of_the_engines_own_machine(
    ranks: str,
    engines: str,
    sources: tuple[int, ...],
    receivers: tuple[int, ...],
    relays: dict[int, int],
    machines: str,
) -> None:
    placement = Placement(seats(*ranks), seats(*engines))
    routes = FileTransport().routes(placement, 1)
    assert routes.ranks == tuple((rank,) for rank in sources)
    assert (routes.receivers, routes.relays) == (receivers, relays)
    assert list(machines_without_ranks(placement)) == list(machines)


def test_large_models_have_longer() -> None:
    assert update_limit(300.0, 0) == 300.0
    assert update_limit(300.0, 141 * 10**9) == 1710.0  # 70B in bfloat16


def test_calls_that_may_hang() -> None:
    def fails() -> None:
        raise OSError("no such network")

    assert error_within(60, lambda: 1) == ""
    assert error_within(60, fails) == "OSError: no such network"
    never = threading.Event()
    assert error_within(0.05, never.wait) == "no end within 0.05 s"
    never.set()
