"""Assigns the trajectories of a step to ranks by their lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from isotrain.data.split import plan_mini_batches
from isotrain.trainers.online.messages import Group, RankPlan, Totals

Value = TypeVar("Value")


@dataclass(frozen=True)
class StepPlan:
    """Trajectories are numbered through the groups of the step, in order."""

    ranks: list[RankPlan]
    own: list[list[int]]
    """Trajectories of each rank."""
    tokens: int
    """Prompt and response tokens of the step."""

    def split(self, values: Mapping[int, Value] | Sequence[Value]) -> list[dict[int, Value]]:
        """Values by trajectory, as each rank needs them."""
        return [{i: values[i] for i in own} for own in self.own]


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
    own = [[i for mini in minis for micro in mini[rank] for i in micro] for rank in range(ranks)]
    plans = []
    for rank in range(ranks):
        needed = sorted({group_of[i] for i in own[rank]})
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
    return StepPlan(plans, own, tokens)
