"""A step's trajectories over mini-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence

from isotrain.data.packing import plan_micro_batches


def plan_mini_batches(
    lengths: Sequence[int], groups: Sequence[int], groups_per_mini_batch: int, budget: int, ranks: int
) -> list[list[list[list[int]]]]:
    """`plan[mini_batch][rank][micro_batch]` lists trajectories by their number in `lengths`.

    Groups (a number for each trajectory) stay whole and go into mini-batches in the order of their numbers,
    whatever order the trajectories came in; the last mini-batch may be smaller. Within a mini-batch all ranks
    have equally many micro-batches.
    """
    assert len(lengths) == len(groups) and groups_per_mini_batch >= 1
    order = {group: place for place, group in enumerate(sorted(set(groups)))}
    minis: list[list[int]] = [[] for _ in range(-(-len(order) // groups_per_mini_batch))]
    for number, group in enumerate(groups):
        minis[order[group] // groups_per_mini_batch].append(number)
    plan = []
    for numbers in minis:
        own = plan_micro_batches([lengths[number] for number in numbers], budget, ranks)
        plan.append([[[numbers[i] for i in micro] for micro in rank] for rank in own])
    return plan
