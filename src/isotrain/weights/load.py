"""New weights on the engine's side, wherever they come from: receive, and see that nothing was left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager

import torch

from isotrain.errors import WeightUpdateError
from isotrain.weights.digest import Contents
from isotrain.weights.transport import TRANSPORTS, error_within
from isotrain.weights.update import WeightUpdate, update_limit


def open_incoming(
    update: WeightUpdate, engine: str, timeout: float, device: torch.device, worker: int = 0
) -> AbstractContextManager[Contents]:
    """A file is verified before its first tensor is given out, what is sent only after its last.

    `worker`: which of the engine's workers takes them; `timeout` is `rollout.update_timeout`.
    """
    transport, limit = TRANSPORTS[update.source(worker).transport], update_limit(timeout, update.bytes)
    return transport.receive(update, engine, limit, device, worker)


def rehearse_incoming(
    update: WeightUpdate, engine: str, timeout: float, device: torch.device, worker: int = 0
) -> str:
    """Receive what is sent and drop it; returns the error, in time also where a driver or network hangs."""

    def receive() -> None:
        with open_incoming(update, engine, timeout, device, worker) as contents:
            for _ in contents.tensors:
                pass

    return error_within(timeout, receive)


def erase(tensors: Iterable[torch.Tensor]) -> None:
    """Fill what an update must write with NaN: a tensor that it leaves out is then seen, however small the
    update is. Types without NaN keep their values."""
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            tensor.detach().fill_(torch.nan)


def unwritten(named: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that hold a NaN."""
    floating = {name: t for name, t in named.items() if t.is_floating_point() and t.numel()}
    if not floating:
        return []
    # A sum is NaN as soon as one element is, and needs no second tensor of the same size.
    sums = torch.stack([tensor.detach().sum(dtype=torch.float32) for tensor in floating.values()])
    return [name for name, is_nan in zip(floating, sums.isnan().tolist(), strict=True) if is_nan]


def check_written(update: WeightUpdate, engine: str, left: Collection[str], count: int) -> None:
    """`left`: what still holds the NaN of `erase`, of `count` tensors."""
    if left:
        raise WeightUpdateError(
            f"{engine}: weight update {update.version} did not write {len(left)} of {count} tensors: "
            f"{', '.join(sorted(left)[:5])}; before an update the engine fills them with NaN, and that is "
            "what they hold. Either the trained weights are NaN, or the engine does not load these tensors "
            "of this model: use another version of it or another rollout.engine"
        )
