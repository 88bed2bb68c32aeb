"""The scores of a step's responses, from reward workers as well as from models on the ranks.

R: trajectories of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isotrain.reward.base import LARGEST_SCORE
from isotrain.trainers.online.failures import Failures, failures_of
from isotrain.trainers.online.messages import Group

Numbers = npt.NDArray[np.float64]


class Scored(NamedTuple):
    scores_R: Numbers
    failures: Failures
    metrics: dict[str, float]
    """Mean scores of the reward models."""


def total_scores(
    groups: Sequence[Group],
    model_scores: Mapping[str, Numbers],
    weights: Mapping[str, float],
    failed_score: float,
) -> Scored:
    """Workers' scores plus those of the models, weighted; where one failed, it has `failed_score`."""
    scores_R = np.array([score.value for group in groups for score in group.scores])
    failed_R = np.array([score.failure is not None for group in groups for score in group.scores])
    failures, metrics = failures_of(groups), {}
    for name, model_scores_R in model_scores.items():
        with np.errstate(over="ignore"):
            total_R = scores_R + weights[name] * model_scores_R
        # Also not one that is infinite as soon as it is a float32, as which ranks compute with it.
        broken_R = ~failed_R & ~(np.abs(total_R) <= LARGEST_SCORE)
        failed_R |= broken_R
        if broken := int(broken_R.sum()):
            first = f"error: reward.{name}: the score {model_scores_R[broken_R][0]:g} is out of range"
            failures = failures.plus(Failures(0, {"error": broken}, first))
        if not failed_R.all():
            metrics[f"reward/{name}/mean"] = float(model_scores_R[~failed_R].mean())
        scores_R = np.where(failed_R, scores_R, total_R)
        scores_R[broken_R] = failed_score
    return Scored(scores_R, failures, metrics)
