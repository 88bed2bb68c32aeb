"""The ranks of a job: how they find each other, and the one device mesh they form."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from isotrain.device.base import Device
from isotrain.device.exchange import CONNECT_ON_DEMAND
from isotrain.errors import LaunchError
from isotrain.models.context import ContextGroup, ContextRank
from isotrain.process.child import raise_file_limit
from isotrain.recipe.schema import MeshSection

# Linux's request for the address of an interface.
SIOCGIFADDR = 0x8915
HOST_VARIABLE = "GLOO_SOCKET_IFNAME"
# Reserved for documents: nothing is sent there, but the system knows by which interface it would be.
ELSEWHERE = "192.0.2.1"


def interface_of(address: str) -> str:
    """The name of this machine's network interface that has an IPv4 address."""
    address_bytes = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if reply[20:24] == address_bytes:
                return name
    if address_bytes[0] == 127:  # every address of that net is the loopback interface's
        return interface_of("127.0.0.1")
    raise LaunchError(f"no network interface has the address {address}; set {HOST_VARIABLE} to its name")


def use_interface(find_address: Callable[[], str], device_variable: str | None) -> None:
    """Let collectives use the interface with that address, unless the user has set one.

    The device's too on one machine: by themselves they would listen on an interface that others reach.
    """
    if HOST_VARIABLE not in os.environ:
        os.environ[HOST_VARIABLE] = interface_of(find_address())
    if device_variable:
        os.environ.setdefault(device_variable, os.environ[HOST_VARIABLE])


def address_towards(host: str) -> str:
    """This machine's own address on the way to a host; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
    return address


def address_towards_master(host: str, one_machine: bool) -> str:
    """The same for torchrun's MASTER_ADDR, which on rank 0's machine may be a name of 127.0.1.1.

    gloo by itself takes the address of this machine's name: where that is 127.0.1.1, as on many systems,
    other machines connect to themselves.
    """
    try:
        address = address_towards(host)
        return address if one_machine or not address.startswith("127.") else address_towards(ELSEWHERE)
    except OSError as error:
        raise LaunchError(
            f"no network interface of this machine leads to MASTER_ADDR={host} ({error}); set it to an IPv4 "
            f"address of rank 0's machine, or set {HOST_VARIABLE} to the interface between the machines"
        ) from error


# Set by our own launcher: ranks of one machine meet in a file, so that nothing listens on a network.
STORE_VARIABLE = "ISOTRAIN_STORE"

# Long enough for the slowest rank to read its shard of a large model, short enough to end a hang.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)

# Seconds between polls of other ranks where no collective may wait for them.
WAIT_SECONDS = 0.2

# Each rank has its own micro-batches and a shard of the weights.
SHARDED = MeshSection()

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    """Its dimension `shard` splits the weights; `replicate`, where there is one, counts copies of them."""
    shape: MeshSection = field(default=SHARDED, kw_only=True)
    local_size: int = field(default=1, kw_only=True)
    """Ranks of this machine, which follow each other."""
    _context_groups: dict[int, ContextGroup] = field(default_factory=dict, repr=False, kw_only=True)

    @property
    def context(self) -> int:
        """Neighbouring ranks that compute each micro-batch together, each a part of its tokens."""
        return self.shape.context

    @property
    def data_rank(self) -> int:
        """Which micro-batches are this rank's; the ranks of a context group have the same."""
        return self.rank // self.context

    @property
    def data_ranks(self) -> int:
        return self.size // self.context

    @property
    def first_copy_rank(self) -> int:
        """The rank with the same shards in the first copy of the weights, which is the one that is saved."""
        return self.rank % (self.size // self.shape.replicas)

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """Its dimension `expert` splits the experts of a mixture, `expert_shard` the weights of each."""
        shape = (self.size // self.shape.expert, self.shape.expert)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("expert_shard", "expert"))

    def context_group(self, heads: int) -> ContextGroup:
        """This rank's context group, split into `heads` by heads; its ranks must ask in the same order."""
        if heads not in self._context_groups:
            this = ContextRank(heads, self.context // heads, self.rank % self.context)
            first = self.rank - this.index
            together = range(first, first + self.context)
            part = this.index // heads * heads
            all_ranks = _group_of(together)
            self._context_groups[heads] = ContextGroup(
                this,
                all_ranks,
                all_ranks if this.ring == 1 else _group_of(together[part : part + heads]),
                all_ranks if heads == 1 else _group_of(together[this.index % heads :: heads]),
            )
        return self._context_groups[heads]

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for all: writes metrics, commits checkpoints."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums of host numbers over all ranks, in float64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums of host numbers over all micro-batches: what a context group has in common counts once."""
        first = self.rank % self.context == 0
        return self.sum(values if first else [0.0] * len(values))

    def from_main(self, values: Sequence[float]) -> list[float]:
        """The main rank's numbers, however many, on all ranks; those of others do not count.

        Ranks that each looked for themselves, such as at a file system that lags behind, might have lists of
        different lengths, and would wait for each other forever.
        """
        (count,) = self.sum([len(values) if self.is_main else 0])
        if not count:
            return []
        return self.sum(values if self.is_main else [0.0] * int(count))

    def barrier(self) -> None:
        self.sum([0.0])

    def machine_first(self, name: str, work: Callable[[], T]) -> T:
        """`work` on all ranks, on one of each machine before the others, which wait as long as it takes.

        Collectives have a time limit that work on data may exceed, so ranks ask their store instead. Names
        are used once.
        """
        if self.size == 1:
            return work()
        store = dist.distributed_c10d._get_default_store()
        done, failed = f"isotrain/{name}/done", f"isotrain/{name}/failed"
        result = None
        if self.local_rank == 0:
            try:
                result = work()
            except Exception as error:
                store.set(failed, str(error))
                raise
        if store.add(f"isotrain/{name}", 1) == self.size:
            store.set(done, "")
        while not store.check([done]):
            if store.check([failed]):
                raise LaunchError(store.get(failed).decode())
            time.sleep(WAIT_SECONDS)
        return work() if result is None else result

    def agree(self, find: Callable[[], str], complaint: str) -> str:
        """The SHA-256 that one rank of each machine finds; `complaint` is for machines that differ."""
        digest = find() if self.local_rank == 0 else None
        leaders = self.sum(
            [float(byte) for byte in bytes.fromhex(digest)] if self.is_main and digest else [0.0] * 32
        )
        agreed = bytes(int(byte) for byte in leaders).hex()
        if self.sum([float(digest not in (None, agreed))]) != [0.0]:
            raise LaunchError(complaint)
        return agreed


def _group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Only its members take part in making it: all ranks making all groups would not end at a thousand."""
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group


def form_mesh(device: Device, size: int, shape: MeshSection) -> DeviceMesh:
    """Ranks of one copy of the weights are neighbours: what they exchange most stays within machines."""
    if problem := shape.problem(size):
        raise LaunchError(problem)
    if shape.replicas == 1:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    copies = (shape.replicas, size // shape.replicas)
    return init_device_mesh(device.type, copies, mesh_dim_names=("replicate", "shard"))


# Meeting places that this process opened for the others; a listening store lives as long as its object.
_opened: dict[str, TCPStore | None] = {}


def open_store(host: str | None, directory: str | None = None) -> str:
    """Make the place where ranks meet, whose name all of them need; rank 0 calls this before anyone joins.

    Without a host it is a file, for ranks of one machine, below `directory` or the system's for temporary
    files; otherwise a socket that listens on that address of this machine alone.
    """
    if host is None:
        path = os.path.join(tempfile.mkdtemp(prefix="isotrain-store-", dir=directory), "store")
        _opened[path] = None
        return path
    listener = socket.create_server((host, 0))
    port = int(listener.getsockname()[1])
    address = f"tcp://{host}:{port}"
    _opened[address] = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return address


def _close_store(address: str, size: int) -> None:
    """Forget what `open_store` made; the file of several ranks stays until the last has left it."""
    if _opened.pop(address) is None and size == 1:
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)


def _meet(store: str, size: int, device: Device) -> Any:
    """The store of that name. Collectives then use the interface that leads to it, and no other."""
    if not store.startswith("tcp://"):
        os.environ.setdefault(HOST_VARIABLE, "lo")
        return FileStore(store, size)
    host, _, port = store.removeprefix("tcp://").rpartition(":")
    met = _opened.get(store) or TCPStore(host, int(port), is_master=False, timeout=COLLECTIVE_TIMEOUT)
    use_interface(lambda: address_towards(host), device.interface_variable)
    return met


def _make_room_for_sockets(size: int) -> None:
    """gloo connects every pair of ranks at the start, more than the usual 1,024 open files allow.

    Large jobs connect on demand instead. Small ones do not: a connection that breaks shows a dead rank at
    once, one that was never made only after the timeout.
    """
    raise_file_limit()
    if size >= CONNECT_ON_DEMAND:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


@contextmanager
def join_world(device: Device, store: str | None = None, shape: MeshSection = SHARDED) -> Iterator[World]:
    """Join the job that the environment describes (as torchrun does), or form one of a single rank.

    `store` is what `open_store` returned on rank 0; without it, the environment's is used.
    """
    rank = int(os.environ.get("RANK", "0"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    store = store or os.environ.get(STORE_VARIABLE)
    place: dict[str, Any] = {}
    if store is not None:
        place = {"store": _meet(store, size, device), "rank": rank, "world_size": size}
    elif "RANK" not in os.environ:
        place = {"store": HashStore(), "rank": 0, "world_size": 1}
    elif host := os.environ.get("MASTER_ADDR"):
        one_machine = os.environ.get("LOCAL_WORLD_SIZE", str(size)) == str(size)
        use_interface(lambda: address_towards_master(host, one_machine), device.interface_variable)
    _make_room_for_sockets(size)
    torch_device = device.activate(local_rank)
    dist.init_process_group(device.collectives, timeout=COLLECTIVE_TIMEOUT, **place)
    try:
        mesh = form_mesh(device, size, shape)
        yield World(rank, size, local_rank, torch_device, mesh, shape=shape, local_size=local_size)
    finally:
        dist.destroy_process_group()
        if store in _opened:
            _close_store(store, size)
