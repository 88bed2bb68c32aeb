"""The process group backend `hccl`."""

import fcntl
import os
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from torch_npu import _C, npu

# Where HCCL listens when nothing else is asked for: on the device's own network, and on the host's.
NPU_PORT, HOST_PORT = 16666, 60000
_listening: dict[Path, IO[str]] = {}


def hccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.distributed_c10d.Backend:
    """A backend for npu tensors whose ranks meet on a store."""
    if size > 1:
        listen(rank)
    return _C.ProcessGroupHCCL(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), timeout)


def listen(rank: int) -> None:
    """Take the ports of a communicator, on a simulated machine that has ports."""
    host = os.environ.get("NPU_SIM_HOST")
    if not host:
        return
    device = _C.physical_device(npu.current_device())
    _take(Path(host), f"npu-{device}-port", NPU_PORT, "HCCL_NPU_SOCKET_PORT_RANGE")
    if rank == 0:  # where the others learn of the communicator
        _take(Path(host), "host-port", HOST_PORT, "HCCL_HOST_SOCKET_PORT_RANGE")


def _take(host: Path, name: str, port: int, variable: str) -> None:
    """Take a port of the simulated machine until the end of the process, which uses it for all its groups."""
    wanted = os.environ.get(variable, "")
    if wanted == "auto":
        return
    first, _, last = wanted.partition("-")
    ports = range(int(first), int(last or first) + 1) if wanted else [port]
    for number in ports:
        path = host / f"{name}-{number}"
        if path in _listening:
            return
        file = path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        _listening[path] = file
        return
    raise RuntimeError(
        "HCCL function error: hcclCommInitRootInfoConfig, error code is 7\n"
        f"[ERROR] (PID:{os.getpid()}) ERR02200 DIST call hccl api failed.\n"
        "Communication_Error_Bind_IP_Port(EJ0003): Failed to bind the IP port. Reason: The IP address and "
        f"port have been bound already. (port {ports[0]}; see {variable})"
    )


def _create(options: Any, _: Any) -> dist.distributed_c10d.Backend:
    return hccl(options.store, options.group_rank, options.group_size, options.timeout)


def register() -> None:
    """Makes `hccl` the backend of npu tensors."""
    dist.Backend.register_backend("hccl", _create, extended_api=True, devices=["npu"])
