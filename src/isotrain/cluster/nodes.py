"""State of the joined cluster: nodes, devices, workers that ended."""

from __future__ import annotations

from dataclasses import dataclass

import ray
from ray._private.state import actors


@dataclass(frozen=True)
class Node:
    id: str
    host: str
    """Its address in the cluster's network."""


def living_nodes() -> list[Node]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [Node(node["NodeID"], node["NodeManagerAddress"]) for node in nodes if node["Alive"]]


def resource_counts(name: str) -> tuple[float, float]:
    """How much of a resource the cluster has, and how much of it nobody has reserved."""
    total = ray.cluster_resources().get(name, 0.0)  # type: ignore[no-untyped-call]
    free = ray.available_resources().get(name, 0.0)  # type: ignore[no-untyped-call]
    return float(total), float(free)


def largest_node(name: str) -> float:
    """The most of a resource that one living node has."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return max((float(node["Resources"].get(name, 0.0)) for node in nodes if node["Alive"]), default=0.0)


def ended_actors() -> set[str]:
    """Ids of the workers of this run that have ended, for whatever reason."""
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    return set(actors(job_id=job, actor_state_name="DEAD"))
