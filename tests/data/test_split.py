from __future__ import annotations

import time
from itertools import chain

import numpy as np
import pytest

from isotrain.data.packing import ATTENTION_CROSSOVER
from isotrain.data.split import plan_mini_batches


def answers(prompts: int, n: int, longest: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Lengths with a long tail, in the order in which engines finish them, and their groups."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(6.2, 0.8, prompts * n), 8, longest).astype(int)
    places = draw.permutation(np.repeat(np.arange(prompts) * 3 + 100, n))
    return lengths.tolist(), places.tolist()


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize(("prompts", "per_mini"), [(1, 1), (7, 3), (64, 16), (5, 100)])
def test_what_every_plan_keeps(prompts: int, per_mini: int, ranks: int) -> None:
    lengths, groups = answers(prompts, 8, 4096)
    plan = plan_mini_batches(lengths, groups, per_mini, budget=4096, ranks=ranks)
    assert len(plan) == -(-prompts // per_mini)
    placed = sorted(i for mini in plan for rank in mini for micro in rank for i in micro)
    assert placed == list(range(len(lengths))), "every trajectory once"
    for mini in plan:
        assert len(mini) == ranks and len({len(rank) for rank in mini}) == 1, "equally many on all ranks"
        assert all(sum(lengths[i] for i in micro) <= 4096 for rank in mini for micro in rank)
    members = [{groups[i] for rank in mini for micro in rank for i in micro} for mini in plan]
    assert list(chain.from_iterable(sorted(m) for m in members)) == sorted(set(groups)), "whole, in order"
    assert all(len(m) == per_mini for m in members[:-1])
    assert plan == plan_mini_batches(lengths, groups, per_mini, budget=4096, ranks=ranks)


def test_by_hand() -> None:
    plan = plan_mini_batches(
        [4, 3, 3, 4, 1], groups=[7, 2, 7, 2, 9], groups_per_mini_batch=2, budget=8, ranks=2
    )
    assert plan == [[[[0, 1]], [[2, 3]]], [[[4]], [[]]]]
    assert plan_mini_batches([], [], 4, budget=8, ranks=2) == []


def test_ranks_have_about_the_same_work() -> None:
    lengths, groups = answers(256, 8, 8192)
    for mini in plan_mini_batches(lengths, groups, 64, budget=16_384, ranks=8):
        cost_RM = np.array(
            [
                [sum(lengths[i] * (1 + lengths[i] / ATTENTION_CROSSOVER) for i in m) for m in rank]
                for rank in mini
            ]
        )
        # The ranks wait for each other in every micro-batch: the sum of the slowest is what a step takes.
        assert cost_RM.max(axis=0).sum() < 1.03 * cost_RM.mean(axis=0).sum()


HARD = {
    "a long tail": np.clip(np.random.default_rng(1).lognormal(6, 1, 16_384), 1, 16_384),
    "just above half of the budget": np.full(16_384, 8193),
    "pairs that mostly fit": np.random.default_rng(2).integers(5000, 9000, 16_384),
    "one token each": np.ones(16_384),
}


@pytest.mark.parametrize("ranks", [1, 8, 1024])
@pytest.mark.parametrize("name", HARD)
def test_a_large_step_is_planned_at_once(name: str, ranks: int) -> None:
    lengths = HARD[name].astype(int).tolist()
    begin = time.process_time()
    plan = plan_mini_batches(lengths, [i // 16 for i in range(16_384)], 1024, budget=16_384, ranks=ranks)
    # 0.01 to 0.4 s on a quiet core. A quadratic plan takes minutes.
    assert time.process_time() - begin < 5
    assert sum(len(micro) for rank in plan[0] for micro in rank) == 16_384
