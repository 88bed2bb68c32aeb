"""Which devices of the cluster the training ranks and the rollout engines get."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from isotrain.cluster.connect import Cluster, check_machines, largest_node, living_nodes, resource_counts
from isotrain.device.base import Device
from isotrain.device.detect import DEVICES, find_device
from isotrain.device.determinism import profile
from isotrain.errors import ClusterError

# Seconds to wait for devices before the user is told.
QUIET = 5.0


@dataclass(frozen=True)
class Slot:
    """A worker's place: a bundle of a placement group, and the devices that are its own there."""

    group: PlacementGroup
    bundle: int
    node: str
    host: str
    devices: tuple[str, ...]
    """Numbers of its devices on that node, ascending; empty where devices are CPUs."""


@dataclass(frozen=True)
class Placement:
    ranks: tuple[Slot, ...]
    """By rank: those of one node follow each other."""
    engines: tuple[Slot, ...]

    @property
    def store_host(self) -> str | None:
        """Where rank 0 opens the ranks' store; None when all are on one node and can meet in a file."""
        return self.ranks[0].host if len({slot.node for slot in self.ranks}) > 1 else None


@dataclass(frozen=True)
class Demand:
    """Devices that a recipe asks for, by the names of its fields."""

    ranks: int
    engines: int = 0
    tensor_parallel: int = 1
    colocated: bool = True

    @property
    def bundles(self) -> list[int]:
        """Devices of each bundle. An engine's are in one, because they must be on one node."""
        engines = [self.tensor_parallel] * self.engines
        if self.colocated:
            return engines + [1] * (self.ranks - sum(engines))
        return [1] * self.ranks + engines


def device_of(cluster: Cluster, name: str) -> Device:
    """The device that a recipe means there: for `auto`, the best that a machine of the cluster has."""
    if cluster.private or name != "auto":
        return find_device(name)
    present = [device for device in DEVICES.values() if resource_counts(device.ray_resource)[0]]
    return present[0] if present else DEVICES["cpu"]


@contextmanager
def place(
    cluster: Cluster,
    device: Device,
    demand: Demand,
    start_timeout: float,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Placement]:
    """Reserve devices until the end of the block.

    A private cluster that has too few says so at once; others may be waiting for machines to join, or for
    devices that another job has, for `start_timeout` seconds.
    """
    resource, sizes = device.ray_resource, demand.bundles
    if cluster.private and sum(sizes) > resource_counts(resource)[0]:
        raise ClusterError(_shortage(demand, resource))
    group = placement_group([{resource: size} for size in sizes], strategy="PACK")
    try:
        if not group.wait(min(QUIET, start_timeout)):
            free = resource_counts(resource)[1]
            tell(f"waiting for {sum(sizes)} {resource} ({free:g} free), at most {start_timeout:g} s")
            if not group.wait(max(0.0, start_timeout - QUIET)):
                raise ClusterError(f"{_shortage(demand, resource)} (waited {start_timeout:g} s)")
        slots = _slots(group, sizes, device, start_timeout)
        check_machines(cluster)  # some may have come since it was joined
        if (idle := resource_counts(resource)[1]) >= 1 and resource != "CPU":
            tell(f"{idle:g} {resource} of the cluster stay idle; device.ranks counts devices of all machines")
        yield assign(slots, demand)
    finally:
        if ray.is_initialized():
            remove_placement_group(group)


def assign(slots: Sequence[Slot], demand: Demand) -> Placement:
    """Bundles to engines and single devices to ranks; `slots` are the bundles of `demand`, in their order."""
    engines = slots[: demand.engines] if demand.colocated else slots[demand.ranks :]
    of_ranks = slots if demand.colocated else slots[: demand.ranks]
    single = [
        Slot(slot.group, slot.bundle, slot.node, slot.host, slot.devices[number : number + 1])
        for slot, size in zip(of_ranks, demand.bundles, strict=False)
        for number in range(size)
    ]
    # Neighbours exchange most: ranks of a node are consecutive, and in the order of its devices.
    single.sort(key=lambda slot: (_numeric(slot.host.split(".")), slot.node, _numeric(slot.devices)))
    return Placement(tuple(single), tuple(engines))


def rank_environments(
    slots: Sequence[Slot], device: Device, determinism: str = "off", beside: Sequence[Slot] = ()
) -> list[dict[str, str]]:
    """Each training rank's variables: who it is, and its node's devices; its own is number LOCAL_RANK.

    `beside` are the slots of others that work at the same time and want their share of a host's cores.
    """
    local_sizes = Counter(slot.node for slot in slots)
    at_work = local_sizes + Counter(slot.node for slot in beside)
    repeatable = profile(device, determinism, os.environ, starts=True).variables
    seen: Counter[str] = Counter()
    environments = []
    for rank, slot in enumerate(slots):
        local_size = local_sizes[slot.node]
        neighbours = [number for other in slots if other.node == slot.node for number in other.devices]
        environments.append(
            {
                **device.rank_environment(at_work[slot.node], len(slots)),
                **repeatable,
                **_visible(device, neighbours),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(slots)),
                "LOCAL_RANK": str(seen[slot.node]),
                "LOCAL_WORLD_SIZE": str(local_size),
            }
        )
        seen[slot.node] += 1
    return environments


def engine_environments(
    slots: Sequence[Slot], device: Device, determinism: str = "off", beside: Sequence[Slot] = ()
) -> list[dict[str, str]]:
    """Each rollout engine's variables: it sees its own devices only. `beside` is as for ranks."""
    at_work = Counter(slot.node for slot in [*slots, *beside])
    repeatable = profile(device, determinism, os.environ, starts=True).variables
    return [
        {**device.rank_environment(at_work[slot.node]), **repeatable, **_visible(device, slot.devices)}
        for slot in slots
    ]


def helper_environment(device: Device) -> dict[str, str]:
    """The variables of workers that use no device, such as those of rewards: they see none."""
    return _visible(device, [])


def _visible(device: Device, numbers: Sequence[str]) -> dict[str, str]:
    variable = device.visible_devices_variable
    if variable is None:
        return {}
    # Ascending, because some drivers refuse any other order.
    return {**device.ray_environment, variable: ",".join(_ascending(numbers))}


def _slots(group: PlacementGroup, sizes: Sequence[int], device: Device, timeout: float) -> list[Slot]:
    hosts = {node.id: node.host for node in living_nodes()}
    nodes = placement_group_table(group)["bundles_to_node_id"]
    devices: list[tuple[str, ...]] = [()] * len(sizes)
    if device.visible_devices_variable is not None:
        asked = [_ask_devices(group, bundle, device.ray_resource, size) for bundle, size in enumerate(sizes)]
        try:
            devices = [_ascending(ids) for ids in ray.get(asked, timeout=timeout)]
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"Ray reserved {device.ray_resource} but did not say which within {timeout:g} s: {error}"
            ) from error
    if gone := {nodes[bundle] for bundle in range(len(sizes))} - set(hosts):
        raise ClusterError(
            f"{len(gone)} machine(s) left the cluster while devices were reserved; start again"
        )
    return [
        Slot(group, bundle, nodes[bundle], hosts[nodes[bundle]], devices[bundle])
        for bundle in range(len(sizes))
    ]


def _ask_devices(group: PlacementGroup, bundle: int, resource: str, size: int) -> Any:
    """A reference to the numbers of the devices that Ray reserved with a bundle."""

    def numbers() -> list[str]:
        ids: list[str] = ray.get_runtime_context().get_accelerator_ids()[resource]
        return ids

    amount = {"num_gpus": size} if resource == "GPU" else {"resources": {resource: size}}
    strategy = PlacementGroupSchedulingStrategy(group, bundle)
    return ray.remote(numbers).options(num_cpus=0, scheduling_strategy=strategy, **amount).remote()


def _ascending(numbers: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(numbers, key=lambda number: _numeric([number])))


def _numeric(words: Sequence[str]) -> list[tuple[int, str]]:
    """Sorts "10" behind "9", and takes words that are not numbers as well."""
    return [(int(word) if word.isdigit() else -1, word) for word in words]


def _shortage(demand: Demand, resource: str) -> str:
    need = sum(demand.bundles)
    largest = largest_node(resource)
    if demand.engines and demand.tensor_parallel > largest:
        return (
            f"rollout.tensor_parallel={demand.tensor_parallel}: an engine runs on one machine, but "
            f"the largest of the Ray cluster has {largest:g} {resource}; lower rollout.tensor_parallel"
        )
    total, free = resource_counts(resource)
    nodes = len(living_nodes())
    if demand.colocated or not demand.engines:
        parts, remedy = f"device.ranks={demand.ranks}", "lower device.ranks"
    else:
        parts = (
            f"device.ranks={demand.ranks} + rollout.engines={demand.engines} x "
            f"rollout.tensor_parallel={demand.tensor_parallel}"
        )
        remedy = "lower one of them, or set cluster.placement=colocated to share devices"
    return (
        f"the recipe needs {need} {resource} ({parts}, one for each rank), but the Ray cluster has {total:g} "
        f"({free:g} free) on {nodes} node{'s' * (nodes != 1)}; {remedy}, or use a larger cluster"
    )
