"""The metadata of a step that controller and workers exchange, of a size that lengths do not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from isotrain.cluster.objects import Handle
from isotrain.data.packing import plan_mini_batches
from isotrain.data.record import Marks
from isotrain.data.trajectory import Trajectory

TrajectoriesHandle = Handle[tuple[Trajectory, ...]]
"""The trajectories of all responses to one draw."""


class PromptRequest(NamedTuple):
    """A drawn prompt to generate responses to."""

    prompt_index: int
    """Which draw of the run this is."""
    row: int
    """Number of the prompt in its store."""


class EpisodeFacts(NamedTuple):
    """One episode, as far as the controller knows it."""

    sequences: int
    turns: int
    calls: int
    failed_calls: int
    seconds: float
    """Time that its environment took."""
    given: int
    """Tokens that the environment wrote between its turns."""
    length: int
    """Tokens of its last sequence from its first turn on."""


def episode_facts(sequences: Sequence[Trajectory]) -> EpisodeFacts:
    by_sequence = [t.episode.turns for t in sequences if t.episode is not None and t.episode.turns]
    turns = [turn for turns_of_one in by_sequence for turn in turns_of_one]
    lengths = [turns_of_one[-1].end - turns_of_one[0].start for turns_of_one in by_sequence]
    return EpisodeFacts(
        sequences=len(sequences),
        turns=len(turns),
        calls=sum(turn.calls for turn in turns),
        failed_calls=sum(turn.failures for turn in turns),
        seconds=sum(turn.seconds for turn in turns),
        given=sum(lengths) - sum(turn.end - turn.start for turn in turns),
        length=lengths[-1] if lengths else 0,
    )


class Responses(NamedTuple):
    """The responses to one draw, as far as the controller knows them."""

    prompt_index: int
    row: int
    prompt_length: int
    response_lengths: tuple[int, ...]
    written: tuple[int, ...]
    """Tokens of each response that the policy wrote."""
    finished: tuple[bool, ...]
    version: int
    """Oldest weights that wrote any of them."""
    mean_version: float
    """Over the tokens that the policy wrote."""
    episodes: tuple[EpisodeFacts, ...] = ()
    """Where the policy acts in an environment. Lengths and the like above are then those of sequences, in the
    order of episodes; an episode can have several."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each response; of an episode, without what its prompt has beyond the common one."""
        return tuple(facts.length for facts in self.episodes) or self.response_lengths

    @property
    def sequences(self) -> tuple[int, ...]:
        """How many each response, or episode, has."""
        return tuple(facts.sequences for facts in self.episodes) or (1,) * len(self.written)


def describe(group: Sequence[Trajectory]) -> Responses:
    """Metadata of the responses to one draw."""
    first = group[0]
    assert all(t.prompt_length == first.prompt_length for t in group)
    version_N = np.concatenate([t.version_N[t.mask_N] for t in group])
    episodes = [list(episode) for _, episode in groupby(group, lambda t: t.sample)] if first.episode else []
    return Responses(
        prompt_index=first.prompt_index,
        row=first.row,
        prompt_length=first.prompt_length,
        response_lengths=tuple(len(t.mask_N) for t in group),
        written=tuple(int(t.mask_N.sum()) for t in group),
        finished=tuple(t.finished for t in group),
        version=int(version_N.min(initial=2**31 - 1)),
        mean_version=float(version_N.mean()) if len(version_N) else 0.0,
        episodes=tuple(map(episode_facts, episodes)),
    )


class Score(NamedTuple):
    value: float
    parts: dict[str, float]
    failure: str | None
    detail: str
    """The error, in one line."""


@dataclass(frozen=True)
class Group:
    """Scored responses to one draw; the trajectories themselves are where `handle` points.

    Of episodes with several sequences, there is one score.
    """

    responses: Responses
    handle: TrajectoriesHandle
    scores: tuple[Score, ...]
    source: str
    """The data set that the prompt is from."""


class Totals(NamedTuple):
    """The size of a mini-batch over all ranks: what shares of its losses are divided by."""

    tokens: int
    sequences: int


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a step. Trajectories are numbered through the groups of the whole step, in order."""

    groups: list[tuple[TrajectoriesHandle, int]]
    """Handles of the groups that have a trajectory of this rank, each with the number of its first one."""
    mini_batches: list[list[list[int]]]
    """`mini_batches[mini][micro]` lists trajectories."""
    totals: list[Totals]
    """Totals of each mini-batch."""
    share_prompts: bool
    """Whether a prompt with several responses in one micro-batch is there once."""


@dataclass(frozen=True)
class RankScores:
    """Scores and advantages of one rank's trajectories, by their numbers."""

    scores: Mapping[int, float]
    advantages: Mapping[int, float] | None
    """Where a whole group is needed to tell them."""
    greedy: Mapping[int, float] | None
    """Scores of the greedy responses to the same prompts, if the algorithm needs them."""
    kl_coefficient: float


@dataclass(frozen=True)
class RankRecord:
    """The recording of one rank's trajectories, by their numbers."""

    directory: str
    step: int
    marks: Mapping[int, Marks]
    advantages: Mapping[int, float] | None
    others: Mapping[str, int]
    """Failures of responses that are not among the trajectories."""


@dataclass(frozen=True)
class RankStep:
    """Input of one rank's updates, for the trajectories that it has loaded."""

    given: RankScores
    lr: float
    critic_lr: float | None
    """Learning rate of the critic, if there is one."""
    old_logps: bool
    """Whether the log-probs of the policy before its first update are needed."""
    updates_policy: bool
    """Not while the critic warms up."""
    record: RankRecord | None


def episode_numbers(groups: Sequence[Group]) -> npt.NDArray[np.int64]:
    """The number of each trajectory's response or episode."""
    counts = [count for group in groups for count in group.responses.sequences]
    return np.repeat(np.arange(len(counts)), counts)


def last_sequences(groups: Sequence[Group]) -> npt.NDArray[np.int64]:
    """The number of the last trajectory of each response or episode: its outcome."""
    counts = [count for group in groups for count in group.responses.sequences]
    return np.cumsum(counts) - 1


Value = TypeVar("Value")


@dataclass(frozen=True)
class StepPlan:
    """Trajectories are numbered through the groups of the step, in order."""

    ranks: list[RankPlan]
    of_ranks: list[list[int]]
    """Trajectories of each rank."""
    tokens: int
    """Prompt and response tokens of the step."""

    def split(self, values: Mapping[int, Value] | Sequence[Value]) -> list[dict[int, Value]]:
        """Values by trajectory, as each rank needs them."""
        return [{i: values[i] for i in numbers} for numbers in self.of_ranks]


def plan_step(
    groups: Sequence[Group], groups_per_mini_batch: int, budget: int, ranks: int, share_prompts: bool
) -> StepPlan:
    firsts = list(accumulate((len(group.responses.written) for group in groups), initial=0))
    group_of = [number for number, group in enumerate(groups) for _ in group.responses.written]
    written = [count for group in groups for count in group.responses.written]
    minis = plan_mini_batches(
        [(group.responses.prompt_length, group.responses.response_lengths) for group in groups],
        groups_per_mini_batch,
        budget,
        ranks,
        share_prompts,
    )
    totals = []
    for mini in minis:
        counts = [written[i] for micros in mini for micro in micros for i in micro]
        totals.append(Totals(sum(counts), sum(count > 0 for count in counts)))
    by_rank = [[i for mini in minis for micro in mini[rank] for i in micro] for rank in range(ranks)]
    plans = []
    for rank in range(ranks):
        needed = sorted({group_of[i] for i in by_rank[rank]})
        plans.append(
            RankPlan(
                groups=[(groups[number].handle, firsts[number]) for number in needed],
                mini_batches=[mini[rank] for mini in minis],
                totals=totals,
                share_prompts=share_prompts,
            )
        )
    tokens = sum(
        group.responses.prompt_length * len(group.responses.written) + sum(group.responses.response_lengths)
        for group in groups
    )
    return StepPlan(plans, by_rank, tokens)
