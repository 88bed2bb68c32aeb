from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from isotrain.data.loader import Sampler, permute


def order(rows: int, seed: int = 42, epoch: int = 0) -> list[int]:
    return [int(row) for row in permute(np.arange(rows), rows, seed, epoch)]


def drawn(sampler: Sampler, batches: int) -> list[list[int]]:
    return [sampler.next_batch().tolist() for _ in range(batches)]


def test_the_order_never_changes() -> None:
    # A resumed run must meet the rows that the first part left: these numbers hold in every version.
    assert order(10)[:8] == [5, 9, 2, 6, 0, 4, 1, 7]
    assert order(10, epoch=1)[:8] == [0, 4, 2, 6, 3, 1, 8, 5]
    assert drawn(Sampler(5, 3, seed=0), 4) == [[1, 0, 3], [2, 4, 1], [0, 4, 3], [2, 2, 1]]
    assert permute(np.array([0, 1, 10**12 - 1]), 10**12, 7, 3).tolist() == [
        302902546358,
        80767751393,
        701348106734,
    ]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 17, 97, 4096, 10_007])
def test_an_epoch_is_a_permutation(rows: int) -> None:
    assert sorted(order(rows)) == list(range(rows))


def test_offsets_may_be_asked_in_any_order() -> None:
    whole = order(100)
    assert permute(np.array([99, 0, 50]), 100, 42, 0).tolist() == [whole[99], whole[0], whole[50]]


def test_epochs_and_seeds_differ() -> None:
    orders = [order(50, seed, epoch) for seed in range(5) for epoch in range(5)]
    assert len({tuple(rows) for rows in orders}) == 25
    assert order(50, seed=0, epoch=1) != order(50, seed=1, epoch=0)
    order(50, seed=2**64 - 1)


@pytest.mark.parametrize("varied", ["seed", "epoch"])
def test_every_order_is_equally_likely(varied: str) -> None:
    draws = 2400
    found = Counter(tuple(order(4, **{varied: number})) for number in range(draws))
    expected = draws / 24
    chi_square = sum((found[p] - expected) ** 2 / expected for p in permutations(range(4)))
    assert chi_square < 49.7  # 23 degrees of freedom: one in a thousand is above


def test_neighbours_are_torn_apart() -> None:
    rows = np.array(order(10_000))
    assert abs(np.corrcoef(np.arange(10_000), rows)[0, 1]) < 0.03
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.03
    assert (np.abs(np.diff(rows)) == 1).sum() < 10, "two are expected"


def test_epochs_flow_into_each_other() -> None:
    batches = drawn(Sampler(rows=10, batch_size=4, seed=1), 5)
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4]
    stream = [row for batch in batches for row in batch]
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))
    assert stream[:10] == order(10, seed=1) and stream[10:] == order(10, seed=1, epoch=1)


def test_a_batch_may_be_larger_than_the_data() -> None:
    (batch,) = drawn(Sampler(rows=3, batch_size=7, seed=1), 1)
    assert batch == order(3, 1, 0) + order(3, 1, 1) + order(3, 1, 2)[:1]


def test_the_limit_makes_the_last_batch_short() -> None:
    sampler = Sampler(rows=10, batch_size=4, seed=1, limit=10)
    batches = drawn(sampler, 4)
    assert [len(batch) for batch in batches] == [4, 4, 2, 0] and sampler.taken == 10
    assert sorted(row for batch in batches for row in batch) == list(range(10))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stream_goes_on_from_where_it_was(shuffle: bool) -> None:
    whole = Sampler(rows=10, batch_size=4, seed=1, shuffle=shuffle)
    batches = drawn(whole, 7)
    for done in range(7):
        resumed = Sampler(rows=10, batch_size=4, seed=1, shuffle=shuffle, taken=4 * done)
        assert drawn(resumed, 7 - done) == batches[done:] and resumed.taken == whole.taken


def test_without_shuffling_rows_come_in_order() -> None:
    sampler = Sampler(rows=5, batch_size=3, seed=1, shuffle=False)
    assert drawn(sampler, 4) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
