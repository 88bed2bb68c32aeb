"""AdamW, whose moments may be kept in host memory or in bfloat16, and the schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from isotrain.models.weights import Shard, shard_of

Schedule = Callable[[int], float]
"""Step (counted from 1) to learning rate."""

# From the share of the way after the warm-up to the share of the height that is left.
FALLS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def make_schedule(
    kind: str,
    lr: float,
    total_steps: int,
    warmup_ratio: float,
    min_lr_ratio: float,
    warmup_steps: int | None = None,
) -> Schedule:
    """Linear warm-up that reaches `lr` at its last step, then `kind` down towards `lr * min_lr_ratio`.

    A warm-up of more steps than there are ends below `lr`.
    """
    warmup = round(total_steps * warmup_ratio) if warmup_steps is None else warmup_steps
    fall = FALLS[kind]

    def schedule(step: int) -> float:
        if step <= warmup:
            return lr * step / warmup
        # The first step after the warm-up is at the top, and the last one still moves the weights.
        done = min(1.0, (step - 1 - warmup) / (total_steps - warmup))
        return lr * (min_lr_ratio + (1.0 - min_lr_ratio) * fall(done))

    return schedule


MOMENTS = ("exp_avg", "exp_avg_sq")

# Float32 moments that are on the device at one time, unless a single parameter has more.
BUCKET_BYTES = 256 << 20


def make_optimizer(
    model: nn.Module,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    fused: bool,
    state_dtype: torch.dtype = torch.float32,
    moments_on_host: bool = False,
) -> torch.optim.AdamW:
    """AdamW over the trained parameters. Each update sets the learning rate."""
    settings = decay_groups([p for p in model.parameters() if p.requires_grad], weight_decay)
    if moments_on_host or state_dtype != torch.float32:
        return StoredMoments(
            settings, dtype=state_dtype, on_host=moments_on_host, betas=betas, eps=eps, fused=fused
        )
    return torch.optim.AdamW(settings, betas=betas, eps=eps, fused=fused)


def decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups; vectors (norms, biases) are not decayed."""
    return [
        {"params": members, "weight_decay": weight_decay if decayed else 0.0}
        for decayed in (True, False)
        for members in on_one_mesh([p for p in parameters if (p.ndim >= 2) == decayed])
    ]


def on_one_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split experts are on a mesh of their own, and one operation cannot update two meshes."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(groups.values())


class StoredMoments(torch.optim.AdamW):
    """torch's AdamW, over a few parameters at a time, whose moments it takes out of store and puts back.

    The arithmetic is always float32 on the device of the weights: moments in host memory change nothing.
    """

    def __init__(self, params: Any, *, dtype: torch.dtype, on_host: bool, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.dtype, self.on_host = dtype, on_host

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = self.param_groups
        try:
            for group in groups:
                for bucket in _buckets([p for p in group["params"] if p.grad is not None]):
                    self.param_groups = [{**group, "params": bucket}]
                    with self.loaded_moments(bucket):
                        super().step()
        finally:
            self.param_groups = groups

    @contextmanager
    def loaded_moments(
        self, bucket: list[nn.Parameter], moments: tuple[str, ...] = MOMENTS
    ) -> Iterator[None]:
        """The moments of some parameters in float32 beside their weights; none before the first update."""
        stored = {p: [self.state[p].get(moment) for moment in moments] for p in bucket}
        for p in bucket:
            if self.state[p]:
                for moment in moments:
                    self.state[p][moment] = self.state[p][moment].to(p.device).float()
        yield
        updates = int(self.state[bucket[0]]["step"].item()) if self.dtype != torch.float32 else 0
        for p in bucket:
            for number, (moment, place) in enumerate(zip(moments, stored[p], strict=True)):
                kept = empty_moment(self, p) if place is None else place
                if kept is not self.state[p][moment]:
                    _put(kept, self.state[p][moment], salt=2 * updates + number)
                    self.state[p][moment] = kept


def empty_moment(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """Zeros where and as the optimizer keeps a moment of a parameter, sharded as that is."""
    optimizer = getattr(optimizer, "rest", optimizer)
    if not isinstance(optimizer, StoredMoments):
        return torch.zeros_like(parameter.detach())
    device = torch.device("cpu") if optimizer.on_host else parameter.device
    return torch.zeros_like(parameter.detach(), dtype=optimizer.dtype, device=device)


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        bytes_of = 2 * 4 * shard_of(parameter.detach()).local.numel()
        if bucket and size + bytes_of > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += bytes_of
    if bucket:
        yield bucket


def _put(place: torch.Tensor, fresh: torch.Tensor, salt: int) -> None:
    target, source = shard_of(place).local, shard_of(fresh)
    rounded = round_stochastically(source, salt) if target.dtype == torch.bfloat16 else source.local
    target.copy_(rounded)


def round_stochastically(part: Shard, salt: int) -> torch.Tensor:
    """Float32 to one of the two bfloat16 neighbours, each the more likely the nearer: right on average.

    To the nearest, a second moment would never fall: at beta 0.999 a step is below half a unit. The noise is
    a hash of the element's number in the whole tensor: neither ranks nor devices change the result.
    """
    bits = _hash(_numbers(part) ^ _wrapped(salt * 0x9E3779B1)) & 0xFFFF
    # The upper half of a float32 is a bfloat16: noise below it carries over with the right probability.
    return (part.local.view(torch.int32) + bits).bitwise_and_(-0x10000).view(torch.float32).bfloat16()


def _numbers(part: Shard) -> torch.Tensor:
    """The low 32 bits of each element's number in the whole tensor."""
    device, numbers, step = part.local.device, None, 1
    # From the last dimension outwards: only the last sum is as large as the part.
    for size, start, whole in zip(
        reversed(part.local.shape), reversed(part.offset), reversed(part.shape), strict=True
    ):
        along = torch.arange(size, device=device, dtype=torch.int32)
        along = along.mul_(_wrapped(step)).add_(_wrapped(start * step))
        numbers = along if numbers is None else along.view(-1, *[1] * numbers.ndim) + numbers
        step *= whole
    return torch.zeros((), device=device, dtype=torch.int32) if numbers is None else numbers


def _hash(number: torch.Tensor) -> torch.Tensor:
    """A mixer of 32 bits (lowbias32)."""
    number = (number ^ _shifted(number, 16)) * _wrapped(0x7FEB352D)
    number = (number ^ _shifted(number, 15)) * _wrapped(0x846CA68B)
    return number ^ _shifted(number, 16)


def _shifted(number: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift to the right; that of signed integers would fill with the sign."""
    return (number >> by) & ((1 << (32 - by)) - 1)


def _wrapped(value: int) -> int:
    """The 32 bits of a number as a signed one."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
