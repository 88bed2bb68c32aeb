"""Two Ray nodes on this machine, which stand for two machines."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ray.cluster_utils import Cluster as Machines

from isotrain.cluster.private import loopback_addresses, read_authentication_again


@contextmanager
def two_machines(cpus: int = 1, count: int = 2, **node: Any) -> Iterator[Machines]:
    """Nodes with `cpus` each, two by default, on the loopback address, with token authentication."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as home,
    ):
        patch.setenv("RAY_TMPDIR", home)
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "2a" * 32)
        read_authentication_again()
        with loopback_addresses():
            cluster = Machines()
            try:
                for _ in range(count):
                    cluster.add_node(num_cpus=cpus, include_dashboard=False, **node)
                yield cluster
            finally:
                cluster.shutdown()
    read_authentication_again()
