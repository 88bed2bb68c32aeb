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
    kind: str, lr: float, total_steps: int, warmup_ratio: float, min_lr_ratio: float
) -> Schedule:
    """Linear warm-up that reaches `lr` at its last step, then `kind` down to `lr * min_lr_ratio`."""
    warmup = round(total_steps * warmup_ratio)
    fall = FALLS[kind]

    def schedule(step: int) -> float:
        if step <= warmup:
            return lr * step / warmup
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        floor = 1.0 if kind == "constant" else min_lr_ratio
        return lr * (floor + (1.0 - floor) * fall(done))

    return schedule
