from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import Encoding

from isotrain.data.items import SAMPLES, Item, Sample
from isotrain.data.loader import BatchLoader, MicroBatch, Sampler
from isotrain.data.rows import Row
from isotrain.data.store import SampleStore
from isotrain.data.tokenise import build_store

ROWS = 23


def encode(row: Row) -> list[Item]:
    """Row number n as n + 1 tokens of the value n + 1, so that a token tells its row."""
    count = row.values["number"] + 1
    return [Item((Sample(np.full(count, count, np.int32), np.ones(count, np.bool_)),))]


@pytest.fixture
def store(tmp_path: Path) -> SampleStore[Item]:
    rows = [Row({"number": number}, f"a:{number}") for number in range(ROWS)]
    return build_store(rows, Encoding(SAMPLES, encode), tmp_path / "store", "key")


def loaders(
    store: SampleStore[Item], ranks: int, *, limit: int | None = None, shuffle: bool = True
) -> list[BatchLoader]:
    return [
        BatchLoader(store, Sampler(ROWS, 8, 3, shuffle, limit), budget=30, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]


def rows_of(batches: list[MicroBatch]) -> list[int]:
    """The rows of packed samples, checked to be whole; those of placeholders are left out."""
    rows = []
    for batch in (micro.packed for micro in batches):
        assert batch.tokens_T.numel() <= 30
        for part in batch.tokens_T.split(batch.lengths):
            value = int(part[0])
            if value:
                assert part.tolist() == [value] * value
                rows.append(value - 1)
    return rows


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_an_epoch_without_overlap(store: SampleStore[Item], ranks: int) -> None:
    own = loaders(store, ranks, limit=2 * ROWS)
    seen: list[int] = []
    for expected in (8, 8, 8, 8, 8, 6):
        steps = [loader.next_step() for loader in own]
        rows = [row for step in steps for row in rows_of(step.batches)]
        assert len(rows) == expected
        assert len({len(step.batches) for step in steps}) == 1, "equally many micro-batches"
        for step in steps:  # what is said of the whole step is the same everywhere
            assert step.lengths == steps[0].lengths and step.tokens == sum(step.lengths)
            assert sorted(step.lengths) == sorted(row + 1 for row in rows)
        assert (
            sum(batch.packed.loss_tokens for step in steps for batch in step.batches)
            == steps[0].tokens - expected
        )
        seen += rows
    assert sorted(seen) == sorted([*range(ROWS), *range(ROWS)])


def test_the_rows_of_a_step_do_not_depend_on_the_ranks(store: SampleStore[Item]) -> None:
    def steps(ranks: int) -> list[list[int]]:
        own = loaders(store, ranks)
        return [
            sorted(row for loader in own for row in rows_of(loader.next_step().batches)) for _ in range(6)
        ]

    assert steps(1) == steps(2) == steps(5)


def test_more_ranks_than_samples(store: SampleStore[Item]) -> None:
    steps = [loader.next_step() for loader in loaders(store, 9, limit=2)]
    rows = [rows_of(step.batches) for step in steps]
    assert sorted(map(len, rows)) == [0] * 7 + [1, 1]
    for step, own in zip(steps, rows, strict=True):
        (micro,) = step.batches
        batch = micro.packed
        assert own or (batch.lengths == (1,) and batch.loss_tokens == 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_pass(store: SampleStore[Item], ranks: int) -> None:
    own = loaders(store, ranks, limit=ROWS, shuffle=False)
    passes = []
    for _ in range(2):  # each pass begins anew
        steps = [[step.batches for step in loader.one_pass()] for loader in own]
        in_order = [
            sorted(row for part in parts for row in rows_of(part)) for parts in zip(*steps, strict=True)
        ]
        assert in_order == [list(range(8)), list(range(8, 16)), list(range(16, ROWS))]
        assert all(loader.sampler.taken == ROWS for loader in own)
        passes.append([batch.packed.tokens_T for parts in steps for part in parts for batch in part])
    assert all(torch.equal(a, b) for a, b in zip(*passes, strict=True))


def test_a_pass_interrupts_nothing_else(store: SampleStore[Item]) -> None:
    loader = loaders(store, 1, limit=ROWS, shuffle=False)[0]
    loader.next_step()
    assert len(list(loader.one_pass())) == 3, "it begins at the first row wherever the sampler was"
