"""Metrics of a step from scores, lengths and versions.

R: trajectories of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from isotrain.algorithms.value import explained_variance
from isotrain.algorithms.whitening import combine
from isotrain.trainers.online.failures import Failures
from isotrain.trainers.online.messages import Group
from isotrain.trainers.online.scores import Numbers
from isotrain.trainers.online.step import AdvantageMetrics, join_spans


def extent(name: str, values_R: Numbers) -> dict[str, float]:
    return {
        f"{name}/mean": float(values_R.mean()),
        f"{name}/max": float(values_R.max()),
        f"{name}/min": float(values_R.min()),
    }


def step_metrics(
    groups: Sequence[Group], scores_R: Numbers, rewards_R: Numbers, version: int, failures: Failures
) -> dict[str, float]:
    """Metrics of a step before its update; `rewards_R` are scores after penalties."""
    prompts = np.array([g.responses.prompt_length for g in groups], float)
    responses_R = np.array([n for g in groups for n in g.responses.response_lengths], float)
    cut_R = ~np.array([done for g in groups for done in g.responses.finished], bool)
    ages = np.array([version - g.responses.version for g in groups], float)
    return {
        **extent("critic/score", scores_R),
        **extent("critic/rewards", rewards_R),
        **extent("prompt_length", prompts),
        **extent("response_length", responses_R),
        "response_length/clip_ratio": float(cut_R.mean()),
        "rollout/staleness/mean": float(ages.mean()),
        "rollout/staleness/max": float(ages.max()),
        **part_metrics(groups),
        **failures.metrics(),
    }


def part_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means of the parts of rewards, over the responses that have them."""
    parts: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for score in group.scores:
            for name, value in score.parts.items():
                parts[name].append(value)
    return {f"reward/{name}/mean": float(np.mean(values)) for name, values in parts.items()}


def validation_metrics(groups: Sequence[Group], scores_R: Numbers, failures: Failures) -> dict[str, float]:
    """The mean score of each data set's prompts over `n` responses each, and how many responses had none."""
    n = len(groups[0].scores)
    by_source: dict[str, list[float]] = defaultdict(list)
    for group, mean in zip(groups, scores_R.reshape(-1, n).mean(axis=1), strict=True):
        by_source[group.source].append(float(mean))
    metrics = {f"val-core/{source}/reward/mean@{n}": float(np.mean(m)) for source, m in by_source.items()}
    return metrics | ({"val/reward_failures": float(failures.count)} if failures.count else {})


def advantage_metrics(parts: Sequence[AdvantageMetrics]) -> dict[str, float]:
    """The ranks' metrics of advantages, returns and values, joined."""
    metrics: dict[str, float] = {}
    for name in parts[0].spans:
        metrics |= join_spans(part.spans[name] for part in parts).metrics(f"critic/{name}")
    critic = [part.critic for part in parts if part.critic is not None]
    if critic:
        returns, residuals = (combine(moments) for moments in zip(*critic, strict=True))
        metrics["critic/vf_explained_var"] = explained_variance(returns, residuals)
    return metrics
