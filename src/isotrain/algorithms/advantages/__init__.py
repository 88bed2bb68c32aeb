"""Advantage estimators by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from isotrain.algorithms.advantages.gae import gae
from isotrain.algorithms.advantages.grpo import grpo
from isotrain.algorithms.advantages.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from isotrain.algorithms.advantages.remax import remax
from isotrain.algorithms.advantages.rloo import rloo


@dataclass(frozen=True)
class Estimator:
    """An estimator, and what a loop must know to call it without knowing its name."""

    function: Callable[..., Any]
    """Of a trajectory: `(rewards_R, group_R) -> advantages_R`, over the groups of the whole batch.
    Of a token: `(rewards_N, mask_N, lengths, *needs) -> (advantages_N, returns_N)`, over any trajectories."""
    per: Literal["trajectory", "token"]
    needs: tuple[str, ...] = ()
    """What it takes besides: the critic's `values_N`, or `greedy_R`, rewards of greedy responses."""
    whiten: bool = False
    """Whether the advantages are then whitened over the tokens of the whole batch."""


# `algorithm.name` to its estimator.
ADVANTAGES = {
    "ppo": Estimator(gae, per="token", needs=("values_N",), whiten=True),
    "grpo": Estimator(grpo, per="trajectory"),
    "rloo": Estimator(rloo, per="trajectory"),
    "reinforce++": Estimator(reinforce_pp, per="token", whiten=True),
    "reinforce++-baseline": Estimator(reinforce_pp_baseline, per="trajectory", whiten=True),
    "remax": Estimator(remax, per="token", needs=("greedy_R",)),
}
