from __future__ import annotations

import math

import pytest
import torch
from steps import numbers

from isotrain.algorithms.whitening import Convention, Moments, combine, moments, whiten, whitened

MASK_N = torch.tensor([1, 1, 0, 1, 1]).bool()


@pytest.mark.parametrize(
    ("convention", "scale"),
    [
        # Of 1, 2, 4, 5 the mean is 3 and the squared deviations sum to 4 + 1 + 1 + 4 = 10.
        ("verl", 1 / math.sqrt(10 / 3 + 1e-8)),
        ("openrlhf", 1 / math.sqrt(10 / 4)),
    ],
)
def test_conventions_by_hand(device_type: str, convention: Convention, scale: float) -> None:
    values_N = torch.tensor([1.0, 2.0, 99.0, 4.0, 5.0], device=device_type)
    result = whiten(values_N, MASK_N.to(device_type), convention=convention)
    expected = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]) * scale
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-6, atol=0)
    assert result.device.type == device_type


def test_parts_have_the_moments_of_the_whole() -> None:
    values_N, mask_N = numbers(0, 1000), numbers(1, 1000) > 0
    together = moments(values_N, mask_N)
    parts = list(zip(values_N.split([300, 0, 700]), mask_N.split([300, 0, 700]), strict=True))
    combined = combine(moments(*part) for part in parts)
    assert combined == pytest.approx(together, rel=1e-14)
    split = torch.cat([whitened(*part, combined) for part in parts])
    torch.testing.assert_close(split, whiten(values_N, mask_N), rtol=1e-6, atol=1e-7)


def test_sums_over_ranks_are_moments() -> None:
    parts = [moments(numbers(seed, 5), MASK_N) for seed in (0, 1)]
    added = Moments(*(sum(column) for column in zip(*parts, strict=True)))
    assert added == pytest.approx(combine(parts))


def test_equals_torch_where_there_is_a_large_mean() -> None:
    values_N = numbers(0, 4096) + 1000
    found = moments(values_N, torch.ones(4096, dtype=torch.bool))
    assert found.mean == pytest.approx(values_N.double().mean().item(), rel=1e-14)
    assert found.variance() == pytest.approx(values_N.double().var().item(), rel=1e-9)
    assert found.variance(unbiased=False) == pytest.approx(
        values_N.double().var(correction=0).item(), rel=1e-9
    )


def test_result_has_mean_0_and_variance_1_under_the_mask() -> None:
    values_N, mask_N = numbers(0, 500) * 3 + 2, numbers(1, 500) > -0.5
    result = whiten(values_N, mask_N)
    assert result[mask_N].mean().item() == pytest.approx(0, abs=1e-6)
    assert result[mask_N].var().item() == pytest.approx(1, rel=1e-5)
    assert not result[~mask_N].any()


@pytest.mark.parametrize("convention", ["verl", "openrlhf"])
@pytest.mark.parametrize(
    ("values", "mask"),
    [
        ([], []),
        ([5.0, math.nan], [0, 0]),
        ([5.0], [1]),
        ([0.1] * 7, [1] * 7),
    ],
    ids=["nothing", "nothing written", "one token", "all equal"],
)
def test_without_spread_all_is_0(convention: Convention, values: list[float], mask: list[int]) -> None:
    result = whiten(torch.tensor(values), torch.tensor(mask).bool(), convention=convention)
    assert result.tolist() == [0.0] * len(values)


def test_half_precision_is_promoted() -> None:
    values_N = numbers(0, 5).bfloat16()
    result = whiten(values_N, MASK_N)
    assert result.dtype == torch.float32
    assert torch.equal(result, whiten(values_N.float(), MASK_N))


def test_moments_of_nothing() -> None:
    nothing = moments(torch.ones(2), torch.zeros(2).bool())
    assert (nothing.number, nothing.mean, nothing.variance()) == (0.0, 0.0, 0.0)
