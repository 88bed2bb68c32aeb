"""The part of a parameter that this rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Shard:
    local: torch.Tensor
    """This rank's part; it shares memory with the parameter."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Where the part begins in the whole, one number per dimension."""

    def part(self) -> tuple[slice, ...]:
        """The part as slices of the whole."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offset, self.local.shape, strict=True)
        )


def shard_of(tensor: torch.Tensor) -> Shard:
    if not isinstance(tensor, DTensor):
        return Shard(tensor, tuple(tensor.shape), (0,) * tensor.ndim)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Shard(tensor.to_local(), tuple(tensor.shape), tuple(offset))
