"""Weights moved by about one unit in the last place: what another order of summation does to a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from isotrain.models.shards import shard_of

# Of float32, which trained weights are kept in. Narrower arithmetic makes noise of its own size from it, as
# large as other kernels make: benchmarks/README.md.
EPS = torch.finfo(torch.float32).eps


@torch.no_grad()
def perturb(parameters: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Multiply every weight by `1 + eps` or `1 - eps`, drawn on the host from seed and name.

    Neither the number of ranks nor the device changes the numbers.
    """
    for name, parameter in parameters:
        shard = shard_of(parameter)
        digest = hashlib.sha256(f"perturbation/{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        up = torch.randint(0, 2, shard.shape, generator=generator, dtype=torch.int8)[shard.part()]
        factor = 1.0 + EPS * (2.0 * up.double() - 1.0)
        shard.local.copy_((shard.local.cpu().double() * factor).to(shard.local.dtype))
