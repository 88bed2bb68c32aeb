"""The nodes of the cluster that this process is connected to."""

from __future__ import annotations

from dataclasses import dataclass

import ray


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
