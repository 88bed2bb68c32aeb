"""Tensors of the simulated npu from one process to another, as torch_npu shares device memory.

Its functions have torch_npu's arguments; a handle names a file descriptor of the process that owns the bytes.
"""

import os
from typing import Any

import torch
from torch.multiprocessing import reductions

from torch_npu import _C

_reduce_others = reductions.reduce_tensor


def rebuild_npu_tensor(
    tensor_cls: type,
    tensor_size: Any,
    tensor_stride: Any,
    tensor_offset: int,
    storage_cls: type,
    dtype: torch.dtype,
    storage_device: int,
    storage_handle: bytes,
    storage_size_bytes: int,
    storage_offset_bytes: int,
    requires_grad: bool,
    ref_counter_handle: bytes,
    ref_counter_offset: int,
    event_handle: bytes,
    event_sync_required: bool,
) -> torch.Tensor:
    """The same bytes in this process."""
    assert requires_grad is False and event_sync_required is False
    assert storage_offset_bytes == ref_counter_offset == 0 and ref_counter_handle == event_handle == b""
    file = storage_handle.decode()
    host = torch.UntypedStorage.from_file(file, shared=True, nbytes=storage_size_bytes)
    flat = torch.empty(0, dtype=dtype).set_(host, 0, (storage_size_bytes // dtype.itemsize,), (1,))
    return _C.borrowed_tensor(flat, storage_device).as_strided(tensor_size, tensor_stride, tensor_offset)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "npu":
        return _reduce_others(tensor)
    host = _C.host_tensor(tensor)
    descriptor, size = host.untyped_storage()._share_fd_cpu_()
    _C.refresh(tensor)  # sharing has moved the bytes
    return rebuild_npu_tensor, (
        type(tensor),
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        torch.TypedStorage,
        tensor.dtype,
        tensor.device.index,
        f"/proc/{os.getpid()}/fd/{descriptor}".encode(),
        size,
        0,
        tensor.requires_grad,
        b"",
        0,
        b"",
        False,
    )


def register() -> None:
    """Makes torch share npu tensors, too."""
    reductions.reduce_tensor = _reduce_tensor
