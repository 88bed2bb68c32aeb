"""New weights on the engine's side, wherever they come from."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from isotrain.rollout.attempts import error_within
from isotrain.rollout.base import WeightUpdate, update_limit
from isotrain.rollout.broadcast import receive_update
from isotrain.rollout.transfer import Contents, open_update


def open_incoming(
    update: WeightUpdate, engine: str, timeout: float, device: torch.device, worker: int = 0
) -> AbstractContextManager[Contents]:
    """A file is verified before its first tensor is given out, what is sent only after its last.

    `worker`: which of the engine's workers takes them; `timeout` is `rollout.update_timeout`.
    """
    if update.in_file:
        return open_update(update, engine)
    addresses = update.address.split(",")
    own = replace(update, address=addresses[worker % len(addresses)])
    return receive_update(own, engine, update_limit(timeout, update.bytes), device)


def rehearse_incoming(
    update: WeightUpdate, engine: str, timeout: float, device: torch.device, worker: int = 0
) -> str:
    """Receive what is sent and drop it; returns the error, in time also where a driver or network hangs."""

    def receive() -> None:
        with open_incoming(update, engine, timeout, device, worker) as contents:
            for _ in contents.tensors:
                pass

    return error_within(timeout, receive)
