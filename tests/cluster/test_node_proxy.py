"""Calls through one agent a machine: two Ray nodes, which stand for two machines, with two ranks each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from plain_workers import Clerk
from ray.cluster_utils import Cluster as Machines

from isotrain.cluster import node_proxy
from isotrain.cluster.connect import join_cluster
from isotrain.cluster.failures import Overdue, WorkerDied
from isotrain.cluster.node_proxy import machines_of, teams
from isotrain.cluster.placement import Demand, place
from isotrain.cluster.workers import Member, WorkerGroup
from isotrain.device.cpu import Cpu
from isotrain.errors import ClusterError, DataError
from isotrain.recipe.online import ClusterSection
from ray_machines import two_machines

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with two_machines(cpus=2) as cluster:
        yield cluster


@contextmanager
def four_ranks(machines: Machines, spmd: bool = True) -> Iterator[WorkerGroup[Clerk]]:
    with (
        join_cluster(ClusterSection(address=machines.address), Cpu()) as cluster,
        place(cluster, Cpu(), Demand(ranks=4), start_timeout=60) as placement,
    ):
        members = [Member((f"clerk{n}",), slot=slot) for n, slot in enumerate(placement.ranks)]
        with WorkerGroup("training rank", Clerk, members, spmd=spmd, start_timeout=90) as group:
            yield group


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.1)


def test_sorts_ranks_by_machine() -> None:
    assert machines_of(["a", "a", "b", "a", "b"]) == [[0, 1, 3], [2, 4]]


def test_the_controller_calls_few_of_many_agents() -> None:
    assert teams(3) == [[0], [1], [2]]
    many = teams(128)
    assert len(many) == 11 and max(map(len, many)) == 12
    assert [number for team in many for number in team] == list(range(128))


class InPairs(WorkerGroup[Clerk]):
    """As if each two workers had a machine of their own."""

    def _machines(self) -> list[list[int]]:
        return [[first, first + 1] for first in range(0, len(self._members), 2)]


def test_agents_lead_others(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_proxy, "FLAT", 1)
    assert teams(3) == [[0, 1], [2]]
    with join_cluster(ClusterSection(address=machines.address), Cpu()):
        members = [Member((f"clerk{n}",)) for n in range(6)]
        with InPairs("training rank", Clerk, members, spmd=True, start_timeout=90) as group:
            assert group.proxies is not None and len(group.proxies) == 3
            assert group.call_each(Clerk.add, list(range(6))) == list(range(6))
            with pytest.raises(Overdue, match=r"`sleep` within 1 s from 2 on 127.0.0.1 \(pid \d+\)$"):
                group.within(1).call_each(Clerk.sleep, [0.0, 0.0, 60.0, 0.0, 0.0, 0.0])
        with InPairs("training rank", Clerk, members, spmd=True, start_timeout=90) as group:
            assert group.proxies is not None
            led = group.proxies.locations[1]
            os.kill(led.pid, signal.SIGKILL)
            with pytest.raises(
                WorkerDied, match=rf"agent of training ranks 1 on 127.0.0.1 \(pid {led.pid}\)"
            ):
                group.call(Clerk.sleep, 600)


def test_a_call_to_all_ranks_is_one_to_each_machine(machines: Machines) -> None:
    with four_ranks(machines) as group:
        assert group.proxies is not None and len(group.proxies) == 2
        assert group.call_each(Clerk.add, [1, 10, 100, 1000]) == [1, 10, 100, 1000]
        assert group.call(Clerk.add, 1, factor=2) == [3, 12, 102, 1002]
        assert group.within(60).call(Clerk.say, "hello") == [f"clerk{n}: hello" for n in range(4)]
        pids = group.call(Clerk.pid) + [where.pid for where in group.proxies.locations]
        assert len(set(pids)) == 6
        # The rank's own words, of rank 3 on the second machine, and not those of its agent.
        with pytest.raises(DataError, match="row 7 is broken"):
            group.call_each(Clerk.fail_or_wait, [False, False, False, True])
        assert group.closed
    wait_for_end(pids)


def test_a_late_rank_is_named(machines: Machines) -> None:
    with four_ranks(machines) as group:
        late = group.locations[2]
        with pytest.raises(Overdue, match=rf"`sleep` within 1 s from 2 on 127.0.0.1 \(pid {late.pid}\)$"):
            group.within(1).call_each(Clerk.sleep, [0.0, 0.0, 60.0, 0.0])
        assert group.closed


@pytest.mark.parametrize("victim", ["rank", "agent"])
def test_a_death_ends_all(machines: Machines, victim: str) -> None:
    with four_ranks(machines) as group:
        assert group.proxies is not None
        ranks, agents = group.locations, group.proxies.locations
        killed = ranks[3] if victim == "rank" else agents[1]
        os.kill(killed.pid, signal.SIGKILL)
        name = "training rank 3" if victim == "rank" else "agent of training ranks 1"
        with pytest.raises(WorkerDied, match=rf"{name} on 127.0.0.1 \(pid {killed.pid}\) died"):
            group.call(Clerk.sleep, 600)
        with pytest.raises(ClusterError, match="the group ended after an error"):
            group.call_on(0, Clerk.pid)
    wait_for_end([where.pid for where in [*ranks, *agents]])


def test_independent_workers_have_no_agents(machines: Machines) -> None:
    with four_ranks(machines, spmd=False) as group:
        assert group.proxies is None
        assert group.call(Clerk.add, 1) == [1, 1, 1, 1]
