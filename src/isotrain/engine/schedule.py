"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

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
