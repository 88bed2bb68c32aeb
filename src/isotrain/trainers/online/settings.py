"""Settings of the maths of an online step, as plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from isotrain.algorithms.advantages import Estimator
from isotrain.algorithms.aggregate import Loss


@dataclass(frozen=True)
class UpdateSettings:
    """All inputs of a policy update besides the responses."""

    temperature: float
    ppo_epochs: int
    loss: Callable[..., Loss]
    loss_options: dict[str, Any]
    aggregation: str
    horizon: int
    entropy: float
    kl_place: str
    kl_estimator: str
    correction: dict[str, Any] | None


@dataclass(frozen=True)
class AdvantageSettings:
    estimator: Estimator
    options: dict[str, Any]
    whitening: Literal["verl", "openrlhf"]
