from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from isotrain.models import ring as ring_module
from isotrain.models.context import ContextLayout, ContextRank, lay_out
from isotrain.models.ring import Block, RingTokens

CASES = [
    ((40,), ()),
    ((7, 1, 30, 2, 16), ()),
    ((11, 9, 4, 23), (-1, 0, 0, -1)),
]


def expected(lengths: tuple[int, ...], continues: tuple[int, ...], window: int | None) -> torch.Tensor:
    """Which packed token sees which, written out."""
    first = (0, *accumulate(lengths))
    seen = torch.zeros(first[-1], first[-1], dtype=torch.int64)
    for segment, length in enumerate(lengths):
        trunk = continues[segment] if continues else -1
        past = list(range(first[trunk], first[trunk + 1])) if trunk >= 0 else []
        own = list(range(first[segment], first[segment] + length))
        for i, query in enumerate(own):
            keys = past + own[: i + 1]
            seen[query, keys[-window:] if window else keys] += 1
    return seen


def seen_in(block: Block, window: int | None) -> torch.Tensor:
    queries, keys = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
    distance = torch.arange(queries)[:, None] - torch.arange(keys) + (block.distance or 0)
    if block.causal:
        return (distance >= 0).long()
    if block.distance is None:
        return torch.ones(queries, keys, dtype=torch.int64)
    assert window is not None
    return ((distance >= 0) & (distance < window)).long()


@pytest.mark.parametrize("ring", [2, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize(("lengths", "continues"), CASES)
def test_each_pair_is_in_one_block(
    lengths: tuple[int, ...],
    continues: tuple[int, ...],
    window: int | None,
    ring: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring_module, "BAND_QUERIES", 3)
    layouts: list[ContextLayout] = [lay_out(lengths, continues, ContextRank(1, ring, i)) for i in range(ring)]
    tokens = RingTokens(layouts[0].parts, layouts[0].lengths, layouts[0].continues)
    total = sum(lengths)
    found = torch.zeros(total + 1, total + 1, dtype=torch.int64)
    for own in range(ring):
        for other in range(ring):
            for block in tokens.blocks(own, other, window):
                queries, keys = layouts[own].places_L[block.queries], layouts[other].places_L[block.keys]
                found[queries[:, None], keys] += seen_in(block, window)
    assert torch.equal(found[:total, :total], expected(lengths, continues, window))


def test_a_long_sample_takes_one_call_for_each_part() -> None:
    layout = lay_out((64,), (), ContextRank(1, 4, 0))
    tokens = RingTokens(layout.parts, layout.lengths, layout.continues)
    assert [len(list(tokens.blocks(1, other))) for other in range(4)] == [1, 1, 1, 1]


def test_a_window_leaves_far_keys_out() -> None:
    layout = lay_out((8192,), (), ContextRank(1, 2, 0))
    tokens = RingTokens(layout.parts, layout.lengths, layout.continues)
    scores = sum(
        (b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start)
        for own in range(2)
        for other in range(2)
        for b in tokens.blocks(own, other, 256)
    )
    assert scores < 8192 * (ring_module.BAND_QUERIES + 2 * 256)
