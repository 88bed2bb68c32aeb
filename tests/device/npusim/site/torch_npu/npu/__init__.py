"""`torch.npu` of the simulated accelerator: what training code calls of torch_npu's device module."""

import contextlib
from collections.abc import Iterator
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch

from torch_npu import _C, npu
from torch_npu.npu import random
from torch_npu.npu.memory import (
    empty_cache,
    ipc_collect,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_peak_memory_stats,
)
from torch_npu.npu.random import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from torch_npu.npu.settings import amp, conv, is_jit_compile_false, matmul, set_compile_mode, set_option
from torch_npu.npu.streams import Event, Stream, current_stream, default_stream, set_stream, stream

Device = torch.device | str | int | None

DEVICE_NAME = "Ascend910B3-sim"

# Gradient checkpointing keeps the generators' states only of a device module that says so here.
_initialized = True


class DeviceProperties(NamedTuple):
    """What `get_device_properties` reports of a chip."""

    name: str
    total_memory: int
    cube_core_num: int
    vector_core_num: int


def device_index(device: Device) -> int:
    """The index that a device argument means; no index means the current device."""
    if device is None or device == "npu":
        return current_device()
    if isinstance(device, int):
        return device if device >= 0 else current_device()
    chosen = torch.device(device)
    if chosen.type != "npu":
        raise ValueError(f"expected an npu device, got {chosen}")
    return current_device() if chosen.index is None else chosen.index


def is_available() -> bool:
    """Whether at least one device is visible."""
    return device_count() > 0


def device_count() -> int:
    """How many devices are visible."""
    return int(_C.device_count())


def current_device() -> int:
    """The index of this thread's device."""
    return int(torch._C._accelerator_getDeviceIndex())


def set_device(device: Device) -> None:
    """Makes a device current for this thread."""
    torch._C._accelerator_setDeviceIndex(device_index(device))


def synchronize(device: Device = None) -> None:
    """Work is finished when a call returns: this only checks the device."""
    torch._C._accelerator_synchronizeDevice(device_index(device))


def init() -> None:
    """torch_npu initialises its runtime here; the simulation has none."""


_lazy_init = init


def is_initialized() -> bool:
    """There is no runtime to wait for, except in the child of a process that used a device."""
    return not _is_in_bad_fork()


def _is_in_bad_fork() -> bool:
    return bool(_C.in_bad_fork())


def get_device_name(device: Device = None) -> str:
    """The chip's name."""
    return get_device_properties(device).name


def get_device_capability(device: Device = None) -> None:
    """Ascend chips have no compute capability."""
    return None


def get_device_properties(device: Device = None) -> DeviceProperties:
    """The chip's name, memory and cores."""
    return DeviceProperties(DEVICE_NAME, mem_get_info(device_index(device))[1], 20, 40)


def is_bf16_supported() -> bool:
    """As on the 910B."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What `torch.autocast("npu")` accepts."""
    return [torch.float16, torch.bfloat16, torch.float32]


def utilization(device: Device = None) -> int:
    """A simulated chip is never busy."""
    return 0


class device:
    """Context manager that changes the current device."""

    def __init__(self, device: Device) -> None:
        self.idx = -1 if device is None else device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = torch._C._accelerator_exchangeDevice(self.idx)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch._C._accelerator_exchangeDevice(self.prev_idx)


@contextlib.contextmanager
def device_of(tensor: Any) -> Iterator[None]:
    """The device of a tensor as current device; other tensors change nothing."""
    index = tensor.device.index if isinstance(tensor, torch.Tensor) and tensor.device.type == "npu" else None
    with device(index):
        yield


def register() -> ModuleType:
    """Makes this module `torch.npu` and adds `.npu()` and `.is_npu` to tensors, modules and storages."""
    torch._register_device_module("npu", npu)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return npu


__all__ = [
    "Event",
    "Stream",
    "amp",
    "conv",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "is_jit_compile_false",
    "manual_seed",
    "manual_seed_all",
    "matmul",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "random",
    "register",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_compile_mode",
    "set_device",
    "set_option",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
    "utilization",
]
