"""Groups over two Ray nodes, which stand for two machines."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import pytest
import ray
from plain_workers import Clerk, Rank
from ray.cluster_utils import Cluster as Machines
from ray.util.placement_group import PlacementGroup

from isotrain.cluster.connect import join_cluster
from isotrain.cluster.failures import WorkerDied
from isotrain.cluster.placement import Demand, place, rank_environments
from isotrain.cluster.workers import Member, WorkerGroup
from isotrain.device.cpu import Cpu
from isotrain.errors import ClusterError
from isotrain.recipe.online import ClusterSection
from ray_machines import two_machines

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with two_machines() as cluster:
        yield cluster


def test_places_ranks_on_two_nodes(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with join_cluster(ClusterSection(address=machines.address), Cpu()) as cluster:
        with place(cluster, Cpu(), Demand(ranks=2), start_timeout=240) as placement:
            assert len({slot.node for slot in placement.ranks}) == 2
            environments = rank_environments(placement.ranks, Cpu())
            assert [own["LOCAL_RANK"] + own["LOCAL_WORLD_SIZE"] for own in environments] == ["01", "01"]
            members = [
                Member(environment=own, slot=slot)
                for own, slot in zip(environments, placement.ranks, strict=True)
            ]
            with WorkerGroup("training rank", Rank, members, spmd=True, start_timeout=240) as group:
                assert [where.node for where in group.locations] == [slot.node for slot in placement.ranks]
                assert placement.store_host == "127.0.0.1"
                store = group.call_on(0, Rank.open_store, placement.store_host)
                port = store.removeprefix("tcp://127.0.0.1:")
                listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=True).stdout
                addresses = [line.split()[3] for line in listening.splitlines()]
                assert [one for one in addresses if one.endswith(f":{port}")] == [f"127.0.0.1:{port}"]
                joined = group.within(240).call(Rank.join, store)
                assert [one["interface"] for one in joined] == ["lo", "lo"]
                assert group.within(30).call_each(Rank.sum, [1.0, 2.0]) == [3.0, 3.0]

        # It could grow, so it is given time, but not for ever.
        waits: list[float] = []
        wait = PlacementGroup.wait
        monkeypatch.setattr(
            PlacementGroup, "wait", lambda group, seconds: waits.append(seconds) or wait(group, seconds)
        )
        with (
            pytest.raises(ClusterError, match=r"needs 3 CPU .*has 2 .*on 2 nodes.*waited 2 s"),
            place(cluster, Cpu(), Demand(ranks=3), start_timeout=2),
        ):
            pass
        assert sum(waits) == 2


@pytest.mark.slow
def test_a_lost_node_is_noticed(machines: Machines) -> None:
    with join_cluster(ClusterSection(address=machines.address), Cpu()) as cluster:
        lost = next(iter(machines.worker_nodes))
        with place(cluster, Cpu(), Demand(ranks=2), start_timeout=240) as placement:
            members = [Member(slot=slot) for slot in placement.ranks]
            group = WorkerGroup("training rank", Clerk, members, spmd=True, start_timeout=60)
            others = WorkerGroup("rollout engine", Clerk, members, start_timeout=600)
            index = [slot.node for slot in placement.ranks].index(lost.node_id)
            pids = group.call(Clerk.pid)
            calls = group.submit(Clerk.sleep, 600)
            machines.remove_node(lost, allow_graceful=False)
            with pytest.raises(WorkerDied, match=f"training rank {index} on 127.0.0.1"):
                group.results(calls, timeout=100)
            deadline = time.monotonic() + 10
            while any(os.path.exists(f"/proc/{pid}") for pid in pids):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            # No other machine has its devices: it is not waited for, which would be told in other words.
            with pytest.raises(
                ClusterError, match=rf"rollout engine {index} cannot .*its machine 127\.0\.0\.1 has left"
            ):
                others.restart(index)
            assert others.call_on(1 - index, Clerk.add, 1) == 1
            others.close()
    assert not ray.is_initialized()
