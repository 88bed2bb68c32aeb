"""Memory statistics of the simulated npu, counted by its allocator."""

from typing import Any

import torch

Device = torch.device | str | int | None


def memory_stats(device: Device = None) -> dict[str, Any]:
    """Every counter of a device, by name."""
    return torch.accelerator.memory_stats(device)


def memory_allocated(device: Device = None) -> int:
    """Bytes that tensors hold."""
    return torch.accelerator.memory_allocated(device)


def max_memory_allocated(device: Device = None) -> int:
    """The most bytes that tensors held since the peak was reset."""
    return torch.accelerator.max_memory_allocated(device)


def memory_reserved(device: Device = None) -> int:
    """Bytes that a caching allocator would have kept."""
    return torch.accelerator.memory_reserved(device)


def max_memory_reserved(device: Device = None) -> int:
    """The most bytes that a caching allocator would have kept since the peak was reset."""
    return torch.accelerator.max_memory_reserved(device)


def reset_peak_memory_stats(device: Device = None) -> None:
    """The peaks start again from what is held now."""
    torch.accelerator.reset_peak_memory_stats(device)


reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """The totals of allocations and releases start again from zero."""
    torch.accelerator.reset_accumulated_memory_stats(device)


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes of the device, with what other processes hold; see `NPU_SIM_HOST`."""
    return torch.accelerator.get_memory_info(device)


def ipc_collect() -> None:
    """Frees memory that other processes have opened and closed; nothing is kept for them here."""


def empty_cache() -> None:
    """Lets go of what is reserved but not allocated."""
    torch.accelerator.empty_cache()
