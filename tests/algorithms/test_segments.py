from __future__ import annotations

import pytest
import torch
from steps import numbers

from isotrain.algorithms.segments import discounted_sums, following, spread, sums, widen, written


def test_sums_and_spreads_by_hand(device_type: str) -> None:
    values_N = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device_type)
    assert sums(values_N, [2, 0, 2]).tolist() == [3.0, 0.0, 7.0]
    assert spread(torch.tensor([5.0, 6.0, 7.0], device=device_type), [2, 0, 1]).tolist() == [5.0, 5.0, 7.0]


def test_discounted_sums_by_hand(device_type: str) -> None:
    # First: 1 + 2/2 + 4/4 = 3, 2 + 4/2 = 4, 4. Second: 8. Third: 1 + 3/2 = 2.5, 3.
    values_N = torch.tensor([1.0, 2.0, 4.0, 8.0, 1.0, 3.0], device=device_type)
    assert discounted_sums(values_N, [3, 1, 2], 0.5).tolist() == [3.0, 4.0, 4.0, 8.0, 2.5, 3.0]


@pytest.mark.parametrize("lengths", [[7], [1, 6], [6, 1], [3, 0, 4], [0, 7, 0], [1] * 7])
@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_discounted_sums_equal_a_loop_over_tokens(lengths: list[int], discount: float) -> None:
    values_N = numbers(0, 7)
    expected = []
    for part in values_N.split(lengths):
        running, reversed_sums = torch.tensor(0.0), []
        for value in reversed(part):
            running = value + discount * running
            reversed_sums.append(running)
        expected += reversed_sums[::-1]
    assert torch.equal(discounted_sums(values_N, lengths, discount), torch.stack(expected))


def test_following_value_ends_with_the_trajectory() -> None:
    values_N = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert following(values_N, [3, 0, 1]).tolist() == [2.0, 3.0, 0.0, 0.0]


def test_written_tokens(device_type: str) -> None:
    at_M, counts = written(torch.tensor([1, 0, 1, 0, 1], device=device_type).bool(), [3, 1, 1])
    assert at_M.tolist() == [0, 2, 4] and counts == [2, 0, 1]


def test_nothing_at_all() -> None:
    nothing = torch.zeros(0)
    assert sums(nothing, []).shape == spread(nothing, []).shape == (0,)
    assert discounted_sums(nothing, [], 1.0).shape == following(nothing, []).shape == (0,)
    assert discounted_sums(nothing, [0, 0], 1.0).shape == (0,)


def test_a_sum_does_not_depend_on_its_neighbours() -> None:
    values_N = numbers(1, 1000)
    alone = sums(values_N[300:700], [400])
    assert torch.equal(sums(values_N, [300, 400, 300])[1:2], alone)


@pytest.mark.parametrize(
    ("given", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
    ],
)
def test_widen(given: torch.dtype, wide: torch.dtype) -> None:
    assert widen(torch.ones(1, dtype=given)).dtype == wide


def test_no_trajectory_has_no_sum_whatever_the_tokens() -> None:
    assert sums(torch.ones(3), []).shape == (0,)
