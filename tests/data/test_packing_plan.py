from __future__ import annotations

import time
from itertools import chain

import numpy as np
import pytest

from isotrain.data.packing import computing_cost, plan_mini_batches

Groups = list[tuple[int, list[int]]]


def answers(prompts: int, n: int, longest: int, seed: int = 0) -> Groups:
    """Prompts and answers with a long tail; a prompt and its longest answer have `longest` tokens at most."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(6.2, 0.8, (prompts, n)), 8, longest - 200).astype(int)
    return [(int(draw.integers(20, 200)), row) for row in lengths.tolist()]


def tokens(groups: Groups, micro: list[int], share: bool) -> int:
    """Of a micro-batch: each trajectory's, or each answer's and each prompt's once."""
    owner = [(number, answer) for number, (_, lengths) in enumerate(groups) for answer in lengths]
    prompts = [owner[i][0] for i in micro]
    return sum(owner[i][1] for i in micro) + sum(groups[p][0] for p in (set(prompts) if share else prompts))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize(("prompts", "per_mini"), [(1, 1), (7, 3), (64, 16), (5, 100)])
def test_what_every_plan_keeps(prompts: int, per_mini: int, ranks: int, share: bool) -> None:
    groups = answers(prompts, 8, 4096)
    plan = plan_mini_batches(groups, per_mini, budget=4096, ranks=ranks, share_prompts=share)
    assert len(plan) == -(-prompts // per_mini)
    placed = sorted(i for mini in plan for rank in mini for micro in rank for i in micro)
    assert placed == list(range(8 * prompts)), "every trajectory once"
    for mini in plan:
        assert len(mini) == ranks and len({len(rank) for rank in mini}) == 1, "equally many on all ranks"
        assert all(tokens(groups, micro, share) <= 4096 for rank in mini for micro in rank)
    members = [{i // 8 for rank in mini for micro in rank for i in micro} for mini in plan]
    assert list(chain.from_iterable(sorted(m) for m in members)) == list(range(prompts)), "whole, in order"
    assert all(len(m) == per_mini for m in members[:-1])
    assert plan == plan_mini_batches(groups, per_mini, budget=4096, ranks=ranks, share_prompts=share)


def test_by_hand() -> None:
    groups: Groups = [(2, [4, 1]), (3, [2, 2])]
    assert plan_mini_batches(groups, 1, 16, ranks=2, share_prompts=True) == [[[[0]], [[1]]], [[[2]], [[3]]]]
    # A prompt of 40 tokens and its four answers are one piece for one rank; each alone would not fit twice.
    long: Groups = [(40, [5, 5, 5, 5])] * 4
    assert plan_mini_batches(long, 4, 120, ranks=1, share_prompts=True) == [
        [[[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]]
    ]
    assert plan_mini_batches([], 4, budget=8, ranks=2, share_prompts=True) == []


@pytest.mark.parametrize("share", [True, False])
def test_ranks_have_about_the_same_work(share: bool) -> None:
    groups = answers(256, 8, 8192)

    def cost(micro: list[int]) -> float:
        owner = [(number, answer) for number, (_, lengths) in enumerate(groups) for answer in lengths]
        prompts = [groups[owner[i][0]][0] for i in micro]
        once = [groups[number][0] for number in {owner[i][0] for i in micro}]
        answered = sum(
            computing_cost(owner[i][1], p + owner[i][1]) for i, p in zip(micro, prompts, strict=True)
        )
        return answered + sum(computing_cost(prompt, prompt) for prompt in (once if share else prompts))

    for mini in plan_mini_batches(groups, 64, budget=16_384, ranks=8, share_prompts=share):
        cost_RM = np.array([[cost(micro) for micro in rank] for rank in mini])
        # The ranks wait for each other in every micro-batch: the sum of the slowest is what a step takes.
        assert cost_RM.max(axis=0).sum() < 1.05 * cost_RM.mean(axis=0).sum()


def test_answers_to_a_prompt_stay_together() -> None:
    """64 ranks, 1,024 prompts of 16 answers: so few ranks fetch a group, and so few read its prompt."""
    groups = answers(1024, 16, 4096)
    (mini,) = plan_mini_batches(groups, 1024, budget=32_768, ranks=64, share_prompts=True)
    readers = [{i // 16 for micro in rank for i in micro} for rank in mini]
    assert sum(len(read) for read in readers) < 3.5 * len(groups)


HARD = {
    "a long tail": np.clip(np.random.default_rng(1).lognormal(6, 1, 16_384), 1, 16_383),
    "just above half of the budget": np.full(16_384, 8193),
    "pairs that mostly fit": np.random.default_rng(2).integers(5000, 9000, 16_384),
    "one token each": np.ones(16_384),
}


@pytest.mark.parametrize("ranks", [1, 8, 1024])
@pytest.mark.parametrize("name", HARD)
def test_a_large_step_is_planned_at_once(name: str, ranks: int) -> None:
    lengths = HARD[name].astype(int).reshape(1024, 16).tolist()
    begin = time.process_time()
    plan = plan_mini_batches([(1, row) for row in lengths], 1024, 16_384, ranks, share_prompts=True)
    # 0.01 to 0.4 s on a quiet core. A quadratic plan takes minutes.
    assert time.process_time() - begin < 5
    assert sum(len(micro) for rank in plan[0] for micro in rank) == 16_384
