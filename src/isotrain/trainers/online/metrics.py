"""Rewards, failures and metrics that the controller computes from a step's scores, lengths and versions.

R: trajectories of a step, E: its responses or episodes.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isotrain.algorithms.advantages import combine
from isotrain.algorithms.policy_losses import explained_variance
from isotrain.data.record import Marks
from isotrain.rewards.base import FAILURES, LARGEST_SCORE
from isotrain.rollout.validation import mean_by_source
from isotrain.trainers.online.messages import Group, episode_numbers
from isotrain.trainers.online.step import AdvantageMetrics, join_spans


def extent(name: str, values_R: Numbers) -> dict[str, float]:
    return {
        f"{name}/mean": float(values_R.mean()),
        f"{name}/max": float(values_R.max()),
        f"{name}/min": float(values_R.min()),
    }


def step_metrics(
    groups: Sequence[Group], scores_E: Numbers, rewards_E: Numbers, version: int, failures: Failures
) -> dict[str, float]:
    """Metrics of a step before its update; `rewards_E` are scores after penalties."""
    prompts = np.array([g.responses.prompt_length for g in groups], float)
    responses_E = np.array([n for g in groups for n in g.responses.lengths], float)
    cut_R = ~np.array([done for g in groups for done in g.responses.finished], bool)
    # A group in which all episodes failed at once has no version.
    ages = np.array([version - g.responses.version for g in groups if any(g.responses.written)] or [0], float)
    token_ages = np.array([version - g.responses.mean_version for g in groups])
    written = np.array([sum(g.responses.written) for g in groups], float)
    return {
        **extent("critic/score", scores_E),
        **extent("critic/rewards", rewards_E),
        **extent("prompt_length", prompts),
        **extent("response_length", responses_E),
        "response_length/clip_ratio": float(cut_R.mean()),
        "rollout/staleness/mean": float(ages.mean()),
        "rollout/staleness/max": float(ages.max()),
        "rollout/staleness/token_mean": float(token_ages @ written / max(1.0, written.sum())),
        **part_metrics(groups),
        **episode_metrics(groups),
        **failures.metrics(),
    }


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over the episodes of a step, where the policy acts in an environment."""
    facts = [facts for group in groups for facts in group.responses.episodes]
    if not facts:
        return {}
    calls = sum(episode.calls for episode in facts)
    return {
        **extent("episode/turns", np.array([episode.turns for episode in facts], float)),
        **extent("timing_s/environment", np.array([episode.seconds for episode in facts])),
        "episode/sequences/mean": float(np.mean([episode.sequences for episode in facts])),
        "episode/calls/mean": calls / len(facts),
        "episode/calls/failed_ratio": sum(episode.failed_calls for episode in facts) / max(1, calls),
        "episode/environment_tokens/mean": float(np.mean([episode.given for episode in facts])),
    }


def part_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means of the parts of rewards, over the responses that have them."""
    parts: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for score in group.scores:
            for name, value in score.parts.items():
                parts[name].append(value)
    return {f"reward/{name}/mean": float(np.mean(values)) for name, values in parts.items()}


def validation_metrics(groups: Sequence[Group], scores_E: Numbers, failures: Failures) -> dict[str, float]:
    """The mean score of each data set's prompts over `n` responses each, and how many responses had none."""
    n = len(groups[0].scores)
    by_source = mean_by_source([group.source for group in groups], scores_E.reshape(-1, n))
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


Numbers = npt.NDArray[np.float64]


class TotalScores(NamedTuple):
    scores_E: Numbers
    failures: Failures
    metrics: dict[str, float]
    """Mean scores of the reward models."""


def total_scores(
    groups: Sequence[Group],
    model_scores: Mapping[str, Numbers],
    weights: Mapping[str, float],
    failed_score: float,
) -> TotalScores:
    """Workers' scores plus those of the models, weighted; where one failed, it has `failed_score`."""
    scores_E = np.array([score.value for group in groups for score in group.scores])
    failed_E = np.array([score.failure is not None for group in groups for score in group.scores])
    failures, metrics = failures_of(groups), {}
    for name, model_scores_E in model_scores.items():
        with np.errstate(over="ignore"):
            total_E = scores_E + weights[name] * model_scores_E
        # Also not one that is infinite as soon as it is a float32, as which ranks compute with it.
        broken_E = ~failed_E & ~(np.abs(total_E) <= LARGEST_SCORE)
        failed_E |= broken_E
        if broken := int(broken_E.sum()):
            first = f"error: reward.{name}: the score {model_scores_E[broken_E][0]:g} is out of range"
            failures = failures.plus(Failures(0, {"error": broken}, first))
        if not failed_E.all():
            metrics[f"reward/{name}/mean"] = float(model_scores_E[~failed_E].mean())
        scores_E = np.where(failed_E, scores_E, total_E)
        scores_E[broken_E] = failed_score
    return TotalScores(scores_E, failures, metrics)


# The first few show what is wrong. Later only much worse steps are reported; the metrics count all.
REPORTS_BEFORE_PAUSES = 3
STEPS_BETWEEN = 10


@dataclass(frozen=True)
class Failures:
    """Number of some responses, and of those without a score by cause, with the first of these."""

    responses: int = 0
    causes: Mapping[str, int] = field(default_factory=dict)
    first: str = ""

    @property
    def count(self) -> int:
        return sum(self.causes.values())

    @property
    def share(self) -> float:
        return self.count / self.responses if self.responses else 0.0

    def plus(self, other: Failures) -> Failures:
        causes = Counter(self.causes) + Counter(other.causes)
        return Failures(self.responses + other.responses, causes, self.first or other.first)

    def metrics(self) -> dict[str, float]:
        names = {"timeout": "reward/timeouts", "crash": "reward/crashes", "error": "reward/errors"}
        by_cause = {names[cause]: float(self.causes.get(cause, 0)) for cause in FAILURES}
        return {"reward/failures": float(self.count), **by_cause}

    def as_counts(self) -> dict[str, int]:
        """As a recording keeps them."""
        return {"responses": self.responses, **self.causes} if self.responses else {}

    def __str__(self) -> str:
        return f"{self.count} of {self.responses} responses got no score; the first because of {self.first}"


def failures_of(groups: Iterable[Group]) -> Failures:
    scores = [score for group in groups for score in group.scores]
    failed = [score for score in scores if score.failure is not None]
    first = f"{failed[0].failure}: {failed[0].detail}" if failed else ""
    return Failures(len(scores), Counter(str(score.failure) for score in failed), first)


def recorded_failures(counts: Mapping[str, int]) -> Failures:
    causes: dict[str, int] = {cause: counts[cause] for cause in FAILURES if counts.get(cause)}
    first = f"{next(iter(causes))}: in a response that was not recorded" if causes else ""
    return Failures(counts.get("responses", 0), causes, first)


@dataclass
class Warnings:
    """When failures of one kind of response are reported: the first few, then twice as many, or all."""

    reports: int = 0
    worst: float = 0.0
    """The largest reported fraction."""
    last: int = 0
    """The last reported step."""

    def is_due(self, step: int, failures: Failures) -> bool:
        """Whether to report this step's failures now; remembers it if so."""
        worse = failures.share == 1.0 or failures.share >= 2 * self.worst
        soon = self.reports >= REPORTS_BEFORE_PAUSES and step < self.last + STEPS_BETWEEN
        if not failures.count or soon or (self.reports >= REPORTS_BEFORE_PAUSES and not worse):
            return False
        self.reports, self.last = self.reports + 1, step
        self.worst = max(self.worst, failures.share)
        return True


# One step can be chance, with few prompts; three hardly.
STEPS_ALIKE = 3


@dataclass
class EqualScores:
    """Whether scores have differed since this start: if not, every advantage is 0 and nothing is learned."""

    steps: int = 0
    """Steps in which they did not differ; none is counted after the first that has a difference."""
    differed: bool = False

    def problem(self, groups: Sequence[Group], scores_E: Numbers, *, compares_within_groups: bool) -> str:
        """A warning after `STEPS_ALIKE` steps without a difference, once."""
        if self.differed or self.steps == STEPS_ALIKE:
            return ""
        sizes = [len(group.scores) for group in groups] if compares_within_groups else [len(scores_E)]
        ends = np.cumsum(sizes)[:-1]
        self.differed = any(np.ptp(part_E) > 0 for part_E in np.split(scores_E, ends))
        self.steps += not self.differed
        if self.differed or self.steps < STEPS_ALIKE:
            return ""
        where = " to a prompt" if compares_within_groups else ""
        return (
            f"in {self.steps} steps all responses{where} scored alike (now {scores_E.mean():g} on average), "
            "so nothing is learned: the task is too hard or too easy, or the reward does not read the "
            "responses as you think; look at them (rollout.record=true, isotrain view); "
            "docs/troubleshooting.md has what to change"
        )


def episode_penalties(
    divergences: Sequence[Sequence[tuple[int, float, float]]], groups: Sequence[Group]
) -> tuple[Numbers, float]:
    """Summed divergences by episode, and the mean over trajectories of their means over tokens.

    `divergences` has number, sum and mean of each trajectory, as the ranks tell them.
    """
    episode_R = episode_numbers(groups)
    kl_R, means = np.zeros(len(episode_R)), []
    for part in divergences:
        for number, total, mean in part:
            kl_R[number] = total
            means.append(mean)
    kl_E: Numbers = np.bincount(episode_R, weights=kl_R).astype(np.float64)
    return kl_E, float(np.mean(means)) if means else 0.0


def trajectory_marks(groups: Sequence[Group], greedy: Mapping[int, float], rewards_E: Numbers) -> list[Marks]:
    """Scores of each trajectory, as they are recorded; those of one episode have the same."""
    scored = [(group, score) for group in groups for score in group.scores]
    marks_E = [
        Marks(
            score=score.value,
            parts=score.parts,
            failure=score.failure,
            source=group.source,
            greedy=greedy.get(group.responses.prompt_index),
            reward=reward,
            detail=score.detail,
        )
        for (group, score), reward in zip(scored, rewards_E.tolist(), strict=True)
    ]
    return [marks_E[i] for i in episode_numbers(groups)]


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time of the block to what `seconds` has of that part."""
    started = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
