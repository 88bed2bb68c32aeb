"""Device memory from one process to others, without the group that training has made for its ranks."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.multiprocessing import reductions

c10d: Any = torch.distributed  # its types leave out what is used here

# From so many processes on, gloo connects pairs when they first talk.
CONNECT_ON_DEMAND = 128


def private_group(backend: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend's group of processes that meet on a store; no other group knows of it."""
    if backend == "nccl":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return c10d.ProcessGroupNCCL(store, rank, size, options)
    # What `init_process_group` does with backends that packages have registered.
    plugin = c10d.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    plugin_options = c10d.distributed_c10d._DistributedBackendOptions()
    plugin_options.store, plugin_options.group_rank, plugin_options.group_size = store, rank, size
    plugin_options.timeout, plugin_options.group_id = timeout, "isotrain-weights"
    plugin_options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(plugin_options, None)


def abort(group: Any, reason: str) -> None:
    """End what a group of `private_group` has begun, and its communicator."""
    # HCCL's groups do not override torch's `abort`, which does nothing.
    abort_hccl = getattr(group, "abort_hccl_comm", None)
    if abort_hccl is None:
        group.abort()
    else:
        abort_hccl(reason)


# Of the arguments from which torch rebuilds a tensor in another process: those that a flat tensor of bytes
# does not settle. Places 0 to 5 are its type, shape, strides, offset, storage type and dtype, 6 the device.
_TOLD = (7, 8, 9, 11, 12, 13, 14)
_DEVICE, _REQUIRES_GRAD, _COUNT = 6, 10, 15


def share(buffer: torch.Tensor) -> list[Any]:
    """How another process of this machine reaches a flat tensor of bytes; plain values, for JSON."""
    # Looked up now: packages for other devices replace it when they are imported.
    _, arguments = reductions.reduce_tensor(buffer)
    if len(arguments) != _COUNT:
        raise RuntimeError(f"torch shares device memory with {len(arguments)} arguments; known are {_COUNT}")
    values = (arguments[place] for place in _TOLD)
    return [{"bytes": base64.b64encode(v).decode()} if isinstance(v, bytes) else v for v in values]


def open_shared(described: list[Any], size: int, device: torch.device, rebuild: str) -> torch.Tensor:
    """The same memory here; `rebuild` is torch's function for this kind of device, as `module:name`."""
    module, _, name = rebuild.partition(":")
    function: Callable[..., torch.Tensor] = getattr(importlib.import_module(module), name)
    arguments: list[Any] = [torch.Tensor, torch.Size([size]), (1,), 0, torch.TypedStorage, torch.uint8]
    arguments += [None] * (_COUNT - len(arguments))
    # The same device may have another number there, where other devices are visible.
    number = torch.accelerator.current_device_index() if device.index is None else device.index
    arguments[_DEVICE] = number
    arguments[_REQUIRES_GRAD] = False
    for place, value in zip(_TOLD, described, strict=True):
        arguments[place] = _from_plain(value)
    return function(*arguments)


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(str(value["bytes"]), validate=True)
    return value if value is None or isinstance(value, bool) else int(value)
