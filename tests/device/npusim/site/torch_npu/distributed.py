"""The process group backend `hccl`."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_npu import _C


def hccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.distributed_c10d.Backend:
    """A backend for npu tensors whose ranks meet on a store."""
    return _C.ProcessGroupHCCL(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), timeout)


def _create(options: Any, _: Any) -> dist.distributed_c10d.Backend:
    return hccl(options.store, options.group_rank, options.group_size, options.timeout)


def register() -> None:
    """Makes `hccl` the backend of npu tensors."""
    dist.Backend.register_backend("hccl", _create, extended_api=True, devices=["npu"])
