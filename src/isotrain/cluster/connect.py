"""Join or start the Ray cluster of a recipe."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_ray_address_file
from ray._private import auto_init_hook
from ray._private.state import actors

from isotrain.cluster.private import (
    has_token,
    loopback_addresses,
    private_cluster,
    read_authentication_again,
    variables,
)
from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.errors import ClusterError
from isotrain.recipe.online import ClusterSection

# A thread that calls Ray after the run would make Ray start a cluster that is open to anyone.
auto_init_hook.enable_auto_connect = False

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HOW_TO_AUTHENTICATE = (
    "run `ray get-auth-token --generate`, copy ~/.ray/auth_token to every machine, and set "
    "RAY_AUTH_MODE=token there, both for `ray start` and for isotrain"
)


@dataclass(frozen=True)
class Cluster:
    address: str
    private: bool
    """Whether it was started here and ends with the run; then it never grows."""
    logs: Path
    """Where Ray's workers on this machine write their output."""
    trusted: bool = True
    """Whether the user says that nobody else reaches it."""
    authenticated: bool = True
    """Whether it refuses requests without a token."""

    @property
    def introduction(self) -> str:
        """One line for the user, and a warning where one is due."""
        if self.private:
            return "started a private Ray cluster"
        joined = f"joined the Ray cluster at {self.address}"
        if self.authenticated:
            return joined
        return (
            f"{joined}\nwarning: this cluster runs code for anyone who reaches its ports. To turn on token "
            f"authentication, {HOW_TO_AUTHENTICATE}"
        )


@contextmanager
def join_cluster(
    cluster: ClusterSection,
    device: Device,
    *,
    cpus: int | None = None,
    ranks: int = 0,
    keep_logs: Path | None = None,
    answer_timeout: float = 30.0,
    is_ending: Callable[[], bool] = lambda: False,
) -> Iterator[Cluster]:
    """Connect this process to the recipe's cluster until the end of the block, however that comes.

    A private cluster has this machine's devices and as many CPUs as Ray finds, or `cpus`; one that is too
    small for `ranks` is not started. `keep_logs` is a directory for its workers' output; if Ray dies, it ends
    this process unless that `is_ending` already. An existing one must answer within `answer_timeout` seconds.
    """
    if ray.is_initialized():
        raise ClusterError("this process is connected to a Ray cluster already; call ray.shutdown() first")
    logging.getLogger("ray").setLevel(logging.ERROR)
    with ExitStack() as stack:
        ends = stack.enter_context(_end_on_sigterm())
        # Calls that fail because we end their workers are not worth a message.
        stack.enter_context(variables(RAY_IGNORE_UNHANDLED_ERRORS="1"))
        address = find_cluster(cluster.address, answer_timeout)
        by_itself = cluster.address == "auto" and not os.environ.get("RAY_ADDRESS")
        if by_itself and "RAY_AUTH_MODE" not in os.environ and has_token():
            # As Ray does with a cluster that it found by itself; to addresses that someone wrote, a token is
            # sent only when the user says so.
            stack.enter_context(variables(RAY_AUTH_MODE="token"))
        if address is None:
            choose_device(device.type)  # it must be here: there is no other machine
            _check_devices(device, ranks)
            resource = device.ray_resource
            counted: dict[str, float] = {} if resource == "CPU" else {resource: device.count()}
            logs = stack.enter_context(private_cluster(counted, cpus, keep_logs, is_ending))
            joined = Cluster(ray.get_runtime_context().gcs_address, private=True, logs=logs)
        else:
            joined = stack.enter_context(_join(address, cluster, answer_timeout))
        ends()
        yield joined


def find_cluster(address: str, answer_timeout: float) -> str | None:
    """The `host:port` to join; None where a private cluster is to be started."""
    if address == "auto":
        named = os.environ.get("RAY_ADDRESS")
        if not named:
            candidate = own_cluster(Path(get_ray_address_file(None)))
            return (
                None if not candidate or knock(candidate, answer_timeout) is ClusterReply.NONE else candidate
            )
        address = named
    if address in ("local", "auto"):
        return None
    if not re.fullmatch(r"[^/\s]+:\d+", address):
        raise ClusterError(
            f"RAY_ADDRESS: cannot use {address!r}; set the head's host:port (as `ray start` prints it), "
            "`local` or `auto`, and run isotrain on a machine of the cluster (ray:// clients do not work)"
        )
    return address


def _check_devices(device: Device, ranks: int) -> None:
    """Before Ray starts, which takes a while. Ray may count cores that this process may not use."""
    counts = {device.count(), os.cpu_count() or 1} if device.ray_resource == "CPU" else {device.count()}
    if ranks > max(counts):
        raise ClusterError(
            f"device.ranks: {ranks} ranks need {ranks} {device.ray_resource}, but this machine has "
            f"{max(counts)}; lower device.ranks, or set cluster.address to a larger cluster"
        )


def own_cluster(file: Path) -> str | None:
    """The address that `ray start` of this user left behind on this machine, perhaps long ago.

    The file is in a directory that every user can write to: that of another one could name any address, which
    would then be sent our token and our code.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor) as opened:
        return opened.read(1000).strip() if os.fstat(descriptor).st_uid == os.getuid() else None


@contextmanager
def _join(address: str, cluster: ClusterSection, answer_timeout: float) -> Iterator[Cluster]:
    answer = knock(address, answer_timeout)
    if answer is ClusterReply.NONE:
        raise ClusterError(
            f"cluster.address: no Ray cluster answered at {address} within {answer_timeout:g} s; start one "
            "with `ray start --head` or set cluster.address=local"
        )
    if answer is ClusterReply.REFUSED:
        raise ClusterError(
            f"cluster.address: the Ray cluster at {address} needs a token, and this process has none or a "
            "wrong one; put the cluster's token into ~/.ray/auth_token and set RAY_AUTH_MODE=token"
        )
    host = address.rpartition(":")[0]
    read_authentication_again()
    try:
        with loopback_addresses() if host in LOOPBACK else nullcontext():
            context: Any = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ValueError, ConnectionError, ray.exceptions.RayError) as error:
        # Another version of Ray or Python, no Ray on this machine, ...: Ray's own words say it best.
        raise ClusterError(f"cluster.address: cannot join the Ray cluster at {address}: {error}") from error
    try:
        logs = Path(context["session_dir"]) / "logs"
        joined = Cluster(
            address,
            private=False,
            logs=logs,
            trusted=cluster.allow_unauthenticated,
            # Without a token of our own, the reply that we had is everybody's.
            authenticated=os.environ.get("RAY_AUTH_MODE") == "token"
            and knock(address, answer_timeout, stranger=True) is ClusterReply.REFUSED,
        )
        check_machines(joined, answer_timeout)
        yield joined
    finally:
        ray.shutdown()


def several_machines(nodes: Sequence[Node]) -> bool:
    """Whether the nodes reach each other over a network."""
    return len({node.host for node in nodes}) > 1


def check_machines(cluster: Cluster, answer_timeout: float = 30.0) -> None:
    """Refuse a cluster that has become multi-node, if it accepts unauthenticated requests."""
    if not cluster.trusted and several_machines(living_nodes()):
        check_authentication(cluster.address, answer_timeout)


def check_authentication(address: str, answer_timeout: float) -> None:
    """Refuse a cluster that accepts unauthenticated requests: to Ray, a request is code to run."""
    if knock(address, answer_timeout, stranger=True) is not ClusterReply.REFUSED:
        raise ClusterError(
            f"the Ray cluster at {address} has several machines and runs code for anyone who reaches its "
            f"ports. Turn on token authentication: {HOW_TO_AUTHENTICATE}. On an isolated network you can set "
            "cluster.allow_unauthenticated=true instead"
        )


def _exit(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _end_on_sigterm() -> Iterator[Callable[[], object]]:
    """SIGTERM does what it did before, or leaves blocks in order, as Ctrl-C does.

    `ray.init` changes the handler for good: yields what is to be called after it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGTERM)
    handler = before if callable(before) else _exit
    signal.signal(signal.SIGTERM, handler)
    try:
        yield lambda: signal.signal(signal.SIGTERM, handler)
    finally:
        signal.signal(signal.SIGTERM, before)


class ClusterReply(Enum):
    OPEN = "open"
    """The cluster accepts requests."""
    REFUSED = "refused"
    """The cluster needs a token, and got none or a wrong one."""
    NONE = "none"
    """No reply in time."""


# In a process of its own, because Ray reads its authentication mode once, and because its client cannot be
# interrupted while it waits for a reply.
_VISITOR = """
import os, sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_get(b"isotrain", None, timeout=10)
except AuthenticationError:
    print("refused", flush=True)
else:
    print("open", flush=True)
os._exit(0)
"""


def knock(address: str, timeout: float, *, stranger: bool = False) -> ClusterReply:
    """How the cluster's head at `host:port` replies to this process, or to one without a token."""
    environment = dict(os.environ)
    if stranger:
        environment = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH_")}
        environment["RAY_AUTH_MODE"] = "disabled"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _VISITOR, address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return ClusterReply.NONE
    last = done.stdout.split()[-1:]
    return ClusterReply(last[0]) if last and done.returncode == 0 else ClusterReply.NONE


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
