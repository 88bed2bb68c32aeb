from __future__ import annotations

import numpy as np
import pytest
import torch

from isotrain.models.context import ContextLayout, ContextRank, lay_out, owners

LENGTHS = (7, 1, 30, 2, 16)
SHAPES = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (3, 2)]


def layouts(lengths: tuple[int, ...], heads: int, ring: int) -> list[ContextLayout]:
    return [lay_out(lengths, (), ContextRank(heads, ring, index)) for index in range(heads * ring)]


@pytest.mark.parametrize(("heads", "ring"), SHAPES)
@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (1, 1, 1), (64,)])
def test_every_token_has_one_place(lengths: tuple[int, ...], heads: int, ring: int) -> None:
    total, found = sum(lengths), layouts(lengths, heads, ring)
    places = torch.cat([layout.places_L for layout in found])
    assert sorted(places[places < total].tolist()) == list(range(total))
    assert places[torch.from_numpy(found[0].order_T)].tolist() == list(range(total))
    assert all(len(layout.places_L) == found[0].sizes[i] >= 1 for i, layout in enumerate(found))
    assert len({layout.sizes for layout in found}) == 1


@pytest.mark.parametrize(("heads", "ring"), SHAPES)
def test_parts_name_the_tokens_they_hold(heads: int, ring: int) -> None:
    found = layouts(LENGTHS, heads, ring)
    first = np.cumsum([0, *LENGTHS])
    for part, runs in enumerate(found[0].parts):
        held = torch.cat([layout.places_L for layout in found[part * heads : (part + 1) * heads]]).tolist()
        told = []
        for segment, start, stop in runs:
            real = segment < len(LENGTHS)
            told += [int(first[segment]) + i if real else sum(LENGTHS) for i in range(start, stop)]
        assert held == told


def test_with_one_part_tokens_keep_their_order() -> None:
    found = layouts(LENGTHS, 4, 1)
    assert torch.cat([layout.places_L for layout in found]).tolist() == [*range(56)]
    found = layouts((*LENGTHS, 3), 4, 1)
    assert found[0].lengths == (*LENGTHS, 3, 1)  # one token fills up
    assert torch.cat([layout.places_L for layout in found]).tolist() == [*range(59), 59]


def test_parts_of_a_ring_have_front_and_back() -> None:
    (first, second) = layouts((8,), 1, 2)
    assert first.places_L.tolist() == [0, 1, 6, 7]
    assert second.places_L.tolist() == [2, 3, 4, 5]


def test_many_short_segments_fill_all_parts_alike() -> None:
    sizes = layouts((1,) * 64 + (3,) * 20, 1, 4)[0].sizes
    assert max(sizes) - min(sizes) <= 2


def test_work_of_a_long_sample_is_even() -> None:
    seen = [int((layout.places_L + 1).sum()) for layout in layouts((4096,), 1, 4)]
    assert max(seen) / min(seen) < 1.001


@pytest.mark.parametrize(("heads", "ring"), SHAPES)
def test_wanted_tokens_have_one_owner(heads: int, ring: int) -> None:
    # A token may be wanted twice: the last of a shared prompt predicts several responses.
    predict_N = np.array([3, 40, 6, 6, 0, 55, 20])
    found, size = layouts(LENGTHS, heads, ring), heads * ring
    wanted = [owners(layout, predict_N, ContextRank(heads, ring, i)) for i, layout in enumerate(found)]
    assert len({one.counts for one in wanted}) == 1 and sum(wanted[0].counts) == len(predict_N)
    places = torch.cat([layout.places_L[one.at_M] for layout, one in zip(found, wanted, strict=True)])
    assert places[wanted[0].order_N].tolist() == predict_N.tolist()
    numbers = torch.cat([one.own_M for one in wanted])
    assert numbers[wanted[0].order_N].tolist() == list(range(len(predict_N)))
    assert [len(one.own_M) for one in wanted] == list(wanted[0].counts) and len(wanted) == size


def test_nothing_is_wanted() -> None:
    layout = lay_out((5,), (), ContextRank(2, 1, 0))
    assert owners(layout, np.zeros(0, np.int64), ContextRank(2, 1, 0)).counts == (0, 0)
