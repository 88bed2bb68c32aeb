"""Prompts that a model is validated on: the same while it trains and in `isotrain evaluate`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from isotrain.data.pictures import Picture
from isotrain.data.trajectory import sample_seed
from isotrain.recipe.online import RolloutSection
from isotrain.rollout.base import Request, Sampling


def validation_index(row: int) -> int:
    """Number of a validation prompt. Those before 0 are no draws of a run, nor share seeds with them."""
    return -1 - row


def validation_sampling(rollout: RolloutSection) -> Sampling:
    return Sampling(rollout.max_tokens, rollout.validation.temperature)


def sample_requests(
    row: int,
    prompt_index: int,
    prompt_P: npt.NDArray[np.int32],
    n: int,
    seed: int,
    pictures: tuple[Picture, ...] = (),
) -> list[Request]:
    """`n` responses to a prompt, each with a seed of its own."""
    seeds = [sample_seed(seed, prompt_index, sample) for sample in range(n)]
    return [
        Request(row, prompt_index, sample, own, prompt_P, pictures=pictures)
        for sample, own in enumerate(seeds)
    ]


def mean_by_source(sources: Sequence[str], scores_PN: npt.NDArray[np.float64]) -> dict[str, list[float]]:
    """The mean over the responses to each prompt, by data set."""
    means: dict[str, list[float]] = defaultdict(list)
    for source, mean in zip(sources, scores_PN.mean(axis=1), strict=True):
        means[source].append(float(mean))
    return dict(means)
