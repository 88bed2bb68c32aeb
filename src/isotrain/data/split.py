"""A step's trajectories over mini-batches and ranks, those of one prompt close together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from isotrain.data.packing import computing_cost, plan_micro_batches
from isotrain.data.sample import Sample
from isotrain.data.shared_prompts import same_prompt

# Pieces of groups are what is spread over ranks. Fewer for each rank, and ranks would wait for each other.
PIECES_PER_RANK = 4
# A piece of more than this part of a micro-batch leaves holes that nothing fits into.
LARGEST_PIECE = 1 / 8
# Unless so many prompts are longer: a prompt that is read once for so many tokens costs little.
PROMPTS_OF_PIECE = 4


class _Piece(NamedTuple):
    """Trajectories of one group that go to the same micro-batch."""

    numbers: list[int]
    tokens: int
    cost: float


def plan_mini_batches(
    groups: Sequence[tuple[int, Sequence[int]]],
    groups_per_mini_batch: int,
    budget: int,
    ranks: int,
    share_prompts: bool,
) -> list[list[list[list[int]]]]:
    """`plan[mini_batch][rank][micro_batch]` lists trajectories, numbered through the groups in their order.

    A group is the length of a prompt and of the responses to it. Groups stay whole within a mini-batch; the
    last mini-batch may be smaller. Within a mini-batch all ranks have equally many micro-batches. With
    `share_prompts` a prompt counts once for all responses of its group in a micro-batch.
    """
    assert groups_per_mini_batch >= 1
    firsts = list(accumulate((len(responses) for _, responses in groups), initial=0))
    plan = []
    for start in range(0, len(groups), groups_per_mini_batch):
        mini = range(start, min(start + groups_per_mini_batch, len(groups)))
        wanted = -(-PIECES_PER_RANK * ranks // len(mini))
        pieces = [
            piece
            for group in mini
            for piece in _cut(*groups[group], firsts[group], wanted, budget, share_prompts)
        ]
        own = plan_micro_batches([p.tokens for p in pieces], budget, ranks, [p.cost for p in pieces])
        plan.append([[sorted(i for p in micro for i in pieces[p].numbers) for micro in rank] for rank in own])
    return plan


def plan_samples(
    samples: Sequence[Sample], prompts: Sequence[int], budget: int, share_prompts: bool
) -> list[list[int]]:
    """One rank's micro-batches of samples that begin with `prompts[i]` tokens of a prompt.

    A sample beyond the budget has a micro-batch of its own.
    """
    groups = same_prompt(samples, prompts)
    order = [number for members in groups for number in members]
    lengths = [
        (prompts[members[0]], [min(len(samples[i]), budget) - prompts[i] for i in members])
        for members in groups
    ]
    plan = plan_mini_batches(lengths, max(1, len(groups)), budget, 1, share_prompts)
    return [[order[i] for i in micro] for mini in plan for micro in mini[0]]


def _cut(
    prompt: int, responses: Sequence[int], first: int, wanted: int, budget: int, share: bool
) -> list[_Piece]:
    """A group in at least `wanted` pieces, if it has so many responses, each within the budget."""
    repeated = 0 if share else prompt
    once = prompt - repeated
    tokens = once + sum(repeated + response for response in responses)
    largest = min(budget, max(int(budget * LARGEST_PIECE), PROMPTS_OF_PIECE * prompt))
    count = max(1, min(len(responses), max(wanted, -(-tokens // largest))))
    order = sorted(range(len(responses)), key=lambda i: (-responses[i], i))
    while True:
        # Longest first into the piece that has least.
        lightest = [(once, piece) for piece in range(count)]
        members: list[list[int]] = [[] for _ in range(count)]
        for i in order:
            size, piece = heapq.heappop(lightest)
            members[piece].append(i)
            heapq.heappush(lightest, (size + repeated + responses[i], piece))
        if count >= len(responses) or max(size for size, _ in lightest) <= budget:
            break
        count = min(2 * count, len(responses))
    sizes = {piece: size for size, piece in lightest}
    return [
        _Piece(
            [first + i for i in chosen],
            sizes[piece],
            computing_cost(once, prompt)
            + sum(computing_cost(repeated + responses[i], prompt + responses[i]) for i in chosen),
        )
        for piece, chosen in enumerate(members)
        if chosen
    ]
