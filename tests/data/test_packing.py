from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from isotrain.data import packing
from isotrain.data.items import Sample
from isotrain.data.packing import _fewest_bins, _fill, computing_cost, pack, plan_micro_batches


def sample(tokens: list[int], mask: list[int]) -> Sample:
    return Sample(np.array(tokens, np.int32), np.array(mask, np.bool_))


def test_three_samples_by_hand() -> None:
    batch = pack([sample([10, 11, 12], [1, 0, 1]), sample([20], [1]), sample([30, 31, 32], [1, 1, 0])])
    assert batch.tokens_T.tolist() == [10, 11, 12, 20, 30, 31, 32]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 0, 1, 2]
    assert batch.lengths == (3, 1, 3)
    # The masks of 10, 20 and 30 count for nothing: they are first in their samples.
    assert batch.predict_N.tolist() == [1, 4] and batch.targets_N.tolist() == [12, 31]
    assert batch.predict_on_host_N is not None and batch.predict_on_host_N.tolist() == [1, 4]
    assert batch.last_S.tolist() == [2, 3, 6]
    assert batch.loss_tokens == 2
    tensors = (batch.tokens_T, batch.positions_T, batch.predict_N, batch.targets_N)
    assert all(tensor.dtype == torch.int64 for tensor in tensors)


def test_targets_stay_inside_their_samples() -> None:
    draw = np.random.default_rng(0)
    samples = [Sample(np.arange(n, dtype=np.int32) + 100 * n, draw.random(n) < 0.5) for n in range(1, 30)]
    batch = pack(samples)
    segment_T = torch.repeat_interleave(torch.arange(29), torch.tensor(batch.lengths))
    assert torch.equal(batch.tokens_T[batch.predict_N + 1], batch.targets_N)
    assert torch.equal(segment_T[batch.predict_N], segment_T[batch.predict_N + 1])
    assert batch.loss_tokens == sum(int(s.mask_T[1:].sum()) for s in samples)


def test_no_samples_are_one_token_without_loss() -> None:
    batch = pack([])
    assert batch.tokens_T.tolist() == [0] and batch.positions_T.tolist() == [0] and batch.lengths == (1,)
    assert batch.loss_tokens == 0 and batch.targets_N.shape == (0,)
    assert batch.targets_N.dtype == torch.int64


def test_to_a_device(device_type: str) -> None:
    batch = pack([sample([1, 2, 3], [0, 1, 1])])
    moved = batch.to(torch.device(device_type))
    for name in ("tokens_T", "positions_T", "predict_N", "targets_N", "last_S"):
        tensor = getattr(moved, name)
        assert tensor.device.type == device_type and torch.equal(tensor.cpu(), getattr(batch, name))
    assert moved.lengths == (3,) and moved.loss_tokens == 2


def chat_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Many short samples and a long tail, as chat data has."""
    lengths = np.random.default_rng(seed).lognormal(5.8, 0.9, count)
    return [int(length) for length in np.clip(lengths, 8, longest)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("count", "budget"), [(0, 100), (1, 4096), (5, 4096), (200, 4096), (200, 50_000)])
def test_every_sample_once_within_the_budget(count: int, budget: int, ranks: int) -> None:
    lengths = chat_lengths(count, 4096)
    plan = plan_micro_batches(lengths, budget, ranks)
    assert len(plan) == ranks and len({len(own) for own in plan}) == 1 and plan[0]
    assert sorted(i for own in plan for chosen in own for i in chosen) == list(range(count))
    assert all(sum(lengths[i] for i in chosen) <= budget for own in plan for chosen in own)
    assert all(chosen == sorted(chosen) for own in plan for chosen in own), "as they were drawn"
    assert plan == plan_micro_batches(lengths, budget, ranks)


def test_plan_by_hand() -> None:
    # Longest first, each to the emptiest micro-batch: 6 | 5, then 3 to the 5, then 2 to the 6.
    assert plan_micro_batches([3, 6, 2, 5], budget=8, ranks=2) == [[[1, 2]], [[0, 3]]]
    # Five tokens would fit three micro-batches of two, but every rank has equally many.
    assert sorted(map(len, plan_micro_batches([2, 2, 1], budget=2, ranks=2))) == [2, 2]


def test_ranks_meet_at_micro_batches_of_like_cost() -> None:
    # 6 | 5 | 4 | 4, then 3 to the first 4: the costliest are 7 and 6, then come 5 and 4.
    assert plan_micro_batches([6, 5, 4, 4, 3], budget=9, ranks=2) == [[[2, 4], [1]], [[0], [3]]]


@pytest.mark.parametrize(
    ("lengths", "fewest"),
    [
        ([], 0),
        ([1], 1),
        ([5, 5], 1),
        ([5, 5, 1], 2),  # one token more than a bin has
        ([6, 6, 6], 3),  # 18 tokens would fit two bins, but no two of these fit one
        ([4, 4, 4, 4, 4], 3),  # two to a bin, not three
        ([4, 4, 3, 3], 2),
        ([3] * 7, 3),
    ],
)
def test_bins_that_any_packing_needs(lengths: list[int], fewest: int) -> None:
    assert _fewest_bins(lengths, budget=10) == fewest


def first_that_fits(lengths: list[int], budget: int, ranks: int) -> int:
    """Micro-batches a rank, tried one after the other."""
    costs = [computing_cost(length, length) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return next(n for n in range(1, len(lengths) + 1) if _fill(order, lengths, costs, budget, n * ranks))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_the_fewest_micro_batches(seed: int, ranks: int) -> None:
    """Samples of a third to a half of the budget leave much of it unused: the first guess is too low."""
    lengths = np.random.default_rng(seed).integers(30, 52, 90).tolist()
    assert len(plan_micro_batches(lengths, 100, ranks)[0]) == first_that_fits(lengths, 100, ranks)


def test_many_micro_batches_are_nearly_the_fewest() -> None:
    lengths = np.random.default_rng(7).integers(30, 52, 1200).tolist()
    fewest = first_that_fits(lengths, 100, 1)
    assert fewest > 400 and fewest <= len(plan_micro_batches(lengths, 100, 1)[0]) <= 1.01 * fewest + 1


@pytest.mark.parametrize(("length", "attempts"), [(600, 1), (400, 1), (59, 1), (1000, 1), (21, 8)])
def test_a_plan_takes_few_attempts(length: int, attempts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt packs all samples. The bound is exact for up to 16 equal samples in a bin."""
    counts: list[int] = []

    def counted(order: Any, lengths: Any, costs: Any, budget: int, count: int) -> list[list[int]] | None:
        counts.append(count)
        return _fill(order, lengths, costs, budget, count)

    monkeypatch.setattr(packing, "_fill", counted)
    plan = plan_micro_batches([length] * 4000, budget=1000, ranks=2)
    assert len(counts) <= attempts, counts
    per_bin = 1000 // length
    assert len(plan[0]) <= (-(-4000 // per_bin) // 2 + 1) * 1.01


def test_cost_by_hand() -> None:
    assert computing_cost(10, 0) == 10 and computing_cost(10, 49152) == 20
    # Costs of their own decide which samples share a micro-batch: the dear one is alone.
    assert plan_micro_batches([2, 2, 2, 2], 8, 2, costs=[9.0, 1.0, 1.0, 1.0]) == [[[0]], [[1, 2, 3]]]


def test_samples_as_long_as_the_budget() -> None:
    plan = plan_micro_batches([64] * 6, budget=64, ranks=2)
    assert [[len(chosen) for chosen in own] for own in plan] == [[1, 1, 1], [1, 1, 1]]


def test_a_sample_beyond_the_budget_is_a_broken_promise() -> None:
    with pytest.raises(AssertionError, match=r"65 tokens.*budget of 64"):
        plan_micro_batches([1, 65], budget=64, ranks=2)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ranks_wait_little_and_budgets_are_used(seed: int) -> None:
    lengths, budget, ranks = chat_lengths(4096, 2048, seed), 8192, 4
    plan = plan_micro_batches(lengths, budget, ranks)
    tokens_RM = np.array([[sum(lengths[i] for i in chosen) for chosen in own] for own in plan])
    fewest = -(-sum(lengths) // (budget * ranks))
    assert tokens_RM.shape[1] <= fewest + 1
    assert tokens_RM.mean() > 0.97 * budget
    assert ((tokens_RM.max(axis=0) - tokens_RM.min(axis=0)) / tokens_RM.mean(axis=0)).max() < 0.01


def test_attention_cost_is_balanced_too() -> None:
    # One sample of 32k tokens costs as much as 53k tokens of short ones: it gets less company.
    lengths = [32_768] + [512] * 192
    first, second = (sum(lengths[i] for i in own[0]) for own in plan_micro_batches(lengths, 131_072, 2))
    assert 1.15 < max(first, second) / min(first, second) < 1.5


def test_a_plan_does_not_depend_on_chance() -> None:
    random.seed(1)
    state = random.getstate()
    plan_micro_batches([5, 5, 5, 4, 4], budget=10, ranks=2)
    assert random.getstate() == state
    # Ties go to the sample that was drawn first.
    assert plan_micro_batches([5, 5, 5, 5], budget=10, ranks=2) == [[[0, 2]], [[1, 3]]]
