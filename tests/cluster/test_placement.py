"""Who gets which device, on paper; test_workers.py asks a real cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from ray._private.accelerators import get_accelerator_manager_for_resource

from isotrain.cluster import connect
from isotrain.cluster import placement as placing
from isotrain.cluster.connect import Cluster, ClusterReply, Node
from isotrain.cluster.placement import (
    Demand,
    Slot,
    assign,
    device_of,
    engine_environments,
    helper_environment,
    place,
    rank_environments,
)
from isotrain.device.cpu import Cpu
from isotrain.device.detect import DEVICES, find_device
from isotrain.device.npu import NPU
from isotrain.errors import ClusterError


def slot(bundle: int, host: str, *devices: str) -> Slot:
    return Slot(None, bundle, f"node-{host}", host, devices)


def places(slots: Sequence[Slot]) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.host, one.devices) for one in slots]


def test_ranks_of_a_node_are_neighbours() -> None:
    slots = [
        slot(0, "10.0.0.10", "1"),
        slot(1, "10.0.0.9", "10"),
        slot(2, "10.0.0.10", "0"),
        slot(3, "10.0.0.9", "9"),
    ]
    ranks = assign(slots, Demand(ranks=4)).ranks
    assert places(ranks) == [
        ("10.0.0.9", ("9",)),
        ("10.0.0.9", ("10",)),
        ("10.0.0.10", ("0",)),
        ("10.0.0.10", ("1",)),
    ]
    environments = rank_environments(ranks, NPU)
    assert [own["RANK"] for own in environments] == ["0", "1", "2", "3"]
    assert [own["LOCAL_RANK"] for own in environments] == ["0", "1", "0", "1"]
    assert {own["WORLD_SIZE"] + own["LOCAL_WORLD_SIZE"] for own in environments} == {"42"}
    assert [own["ASCEND_RT_VISIBLE_DEVICES"] for own in environments] == ["9,10", "9,10", "0,1", "0,1"]
    assert all(own["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"] == "1" for own in environments)


def test_colocated_engines_share_the_devices_of_ranks() -> None:
    demand = Demand(ranks=5, engines=2, tensor_parallel=2)
    assert demand.bundles == [2, 2, 1]
    placement = assign([slot(0, "a", "2", "3"), slot(1, "b", "0", "1"), slot(2, "a", "0")], demand)
    assert places(placement.ranks) == [
        ("a", ("0",)),
        ("a", ("2",)),
        ("a", ("3",)),
        ("b", ("0",)),
        ("b", ("1",)),
    ]
    assert places(placement.engines) == [("a", ("2", "3")), ("b", ("0", "1"))]
    assert placement.store_host == "a"
    environments = engine_environments(placement.engines, NPU)
    assert [own["ASCEND_RT_VISIBLE_DEVICES"] for own in environments] == ["2,3", "0,1"]
    for own in environments + rank_environments(placement.ranks, NPU):  # two processes on a device
        assert own["HCCL_HOST_SOCKET_PORT_RANGE"] == own["HCCL_NPU_SOCKET_PORT_RANGE"] == "auto"


def test_separate_engines_have_devices_of_their_own() -> None:
    demand = Demand(ranks=2, engines=1, tensor_parallel=2, colocated=False)
    assert demand.bundles == [1, 1, 2]
    placement = assign([slot(0, "a", "0"), slot(1, "a", "1"), slot(2, "a", "2", "3")], demand)
    assert places(placement.ranks) == [("a", ("0",)), ("a", ("1",))]
    assert places(placement.engines) == [("a", ("2", "3"))]
    assert placement.store_host is None


def test_cpus_are_not_hidden() -> None:
    ranks = assign([slot(0, "a"), slot(1, "a")], Demand(ranks=2)).ranks
    assert [own["LOCAL_RANK"] for own in rank_environments(ranks, Cpu())] == ["0", "1"]
    assert all("OMP_NUM_THREADS" in own for own in rank_environments(ranks, Cpu()))
    assert all(set(own) == {"OMP_NUM_THREADS"} for own in engine_environments(ranks, Cpu()))
    assert helper_environment(Cpu()) == {}


def test_helpers_see_no_device() -> None:
    assert helper_environment(NPU)["ASCEND_RT_VISIBLE_DEVICES"] == ""


def test_the_names_that_ray_knows() -> None:
    assert {name: device.ray_resource for name, device in DEVICES.items()} == {
        "cuda": "GPU",
        "npu": "NPU",
        "cpu": "CPU",
    }
    for device in DEVICES.values():
        manager = get_accelerator_manager_for_resource(device.ray_resource)
        if device.visible_devices_variable is None:
            assert manager is None and device.ray_environment == {}
            continue
        # Ray's own code must then leave the variable alone.
        variable = manager.get_visible_accelerator_ids_env_var()
        assert variable == device.visible_devices_variable
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(variable, "before")
            for name, value in device.ray_environment.items():
                patch.setenv(name, value)
            manager.set_current_process_visible_accelerator_ids(["5"])
            assert os.environ[variable] == "before"


class Reserved:
    """In the place of Ray's group: its devices are there at the second time of asking."""

    def __init__(self) -> None:
        self.answers = iter([False, True])

    def wait(self, timeout: float) -> bool:
        return next(self.answers)


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of eight devices on two machines, of which the second came after it was joined."""
    monkeypatch.setattr(placing, "placement_group", lambda bundles, strategy: Reserved())
    monkeypatch.setattr(placing, "remove_placement_group", lambda group: None)
    slots = [slot(0, "10.0.0.1", "0"), slot(1, "10.0.0.2", "0")]
    monkeypatch.setattr(placing, "_slots", lambda *_: slots)
    counts = {"NPU": (8.0, 6.0), "CPU": (64.0, 64.0)}
    monkeypatch.setattr(placing, "resource_counts", lambda name: counts.get(name, (0.0, 0.0)))
    nodes = [Node("a", "10.0.0.1"), Node("b", "10.0.0.2")]
    monkeypatch.setattr(connect, "living_nodes", lambda: nodes)
    monkeypatch.setattr(connect, "knock", lambda *_, **__: ClusterReply.OPEN)


def test_a_machine_that_came_later_is_no_way_around_the_token(grown: None) -> None:
    joined = Cluster("10.0.0.1:6379", private=False, logs=Path(), trusted=False)
    with pytest.raises(ClusterError, match="several machines"), place(joined, NPU, Demand(ranks=2), 60):
        pass


def test_waiting_and_idle_devices_are_told(grown: None) -> None:
    joined = Cluster("10.0.0.1:6379", private=False, logs=Path(), trusted=True)
    told: list[str] = []
    with place(joined, NPU, Demand(ranks=2), 60, told.append):
        pass
    assert told == [
        "waiting for 2 NPU (6 free), at most 60 s",
        "6 NPU of the cluster stay idle; device.ranks counts devices of all machines",
    ]


def test_the_cluster_and_not_the_driver_says_what_auto_is(grown: None) -> None:
    joined = Cluster("10.0.0.1:6379", private=False, logs=Path())
    assert device_of(joined, "auto") is NPU
    assert device_of(joined, "cpu").type == "cpu"
    assert device_of(joined, "cuda").type == "cuda", "it need not be here"
    here = Cluster("127.0.0.1:1", private=True, logs=Path())
    assert device_of(here, "auto") is find_device("auto")


def test_cores_are_shared_with_those_who_work_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(Cpu, "count", lambda self: 12)
    ranks, engines = [slot(0, "a"), slot(1, "a"), slot(2, "b")], [slot(3, "a"), slot(4, "b")]

    def threads(environments: list[dict[str, str]]) -> list[str]:
        return [environment["OMP_NUM_THREADS"] for environment in environments]

    assert threads(rank_environments(ranks, Cpu())) == ["6", "6", "12"]
    assert threads(rank_environments(ranks, Cpu(), beside=engines)) == ["4", "4", "6"]
    assert threads(engine_environments(engines, Cpu())) == ["12", "12"]
    assert threads(engine_environments(engines, Cpu(), beside=ranks)) == ["4", "6"]
