from __future__ import annotations

import math

import pytest
import torch
from steps import LENGTHS, MASK, cut, numbers, whole

from isotrain.algorithms.advantages import combine, moments
from isotrain.algorithms.aggregation import AGGREGATIONS
from isotrain.algorithms.policy_losses import explained_variance, value_loss


@pytest.mark.parametrize(
    ("value", "target", "expected", "clipped", "slope"),
    [
        # The old value is 0 and values are held within 0.5 of it.
        (0.4, 1.0, 0.36 / 2, 0, -0.6),  # inside: (0.4 - 1)^2
        (0.8, 1.0, 0.25 / 2, 1, 0.0),  # held at 0.5, which is worse: (0.5 - 1)^2
        (0.8, 0.0, 0.64 / 2, 0, 0.8),  # held at 0.5, which would be better: (0.8 - 0)^2
        (-0.8, -1.0, 0.25 / 2, 1, 0.0),
    ],
)
def test_by_hand(
    device_type: str, value: float, target: float, expected: float, clipped: int, slope: float
) -> None:
    values_N = torch.tensor([value], device=device_type, requires_grad=True)
    old_N, returns_N = (torch.tensor([x], device=device_type) for x in (0.0, target))
    loss, metrics = value_loss(values_N, old_N, returns_N, whole([1], device=device_type))
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert metrics["critic/vf_loss"].item() == loss.item()
    assert metrics["critic/vf_clipfrac"].item() == clipped
    assert values_N.grad is not None and values_N.grad.item() == pytest.approx(slope, rel=1e-6)


def test_without_clipping_it_is_half_the_squared_error() -> None:
    values_N, returns_N = numbers(0), numbers(1)
    share = whole(LENGTHS, MASK)
    loss, metrics = value_loss(values_N, values_N + 9, returns_N, share, clip=None)
    expected = (values_N - returns_N)[share.mask_N].square().mean() / 2
    torch.testing.assert_close(loss, expected)
    assert metrics["critic/vf_clipfrac"].item() == 0


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Squared errors 4, 1 and 16 of trajectories with two tokens and one, halved; the horizon is 10.
        ("token-mean", (4 + 1 + 16) / 2 / 3),
        ("seq-mean-token-sum", (5 + 16) / 2 / 2),
        ("seq-mean-token-mean", (2.5 + 16) / 2 / 2),
        ("seq-mean-token-sum-norm", (5 + 16) / 2 / 2 / 10),
    ],
)
def test_aggregation_by_hand(device_type: str, aggregation: str, expected: float) -> None:
    values_N, returns_N = (
        torch.zeros(3, device=device_type),
        torch.tensor([2.0, 1.0, 4.0], device=device_type),
    )
    share = whole([2, 1], horizon=10, device=device_type)
    loss, _ = value_loss(values_N, values_N, returns_N, share, clip=None, aggregation=aggregation)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
def test_shares_add_up(aggregation: str) -> None:
    share, tensors = whole(LENGTHS, MASK, horizon=10), [numbers(seed) for seed in range(3)]
    loss, metrics = value_loss(*tensors, share, aggregation=aggregation)
    parts = [
        value_loss(*(x[at] for x in tensors), part, aggregation=aggregation)
        for part, at in cut(share, [[2, 1], [], [0]])
    ]
    torch.testing.assert_close(torch.stack([part for part, _ in parts]).sum(), loss)
    clipped = torch.stack([part["critic/vf_clipfrac"] for _, part in parts]).sum()
    torch.testing.assert_close(clipped, metrics["critic/vf_clipfrac"])
    assert 0 < clipped < 1


def test_gradcheck() -> None:
    share, values_N = whole(LENGTHS, MASK), numbers(0).double().requires_grad_()
    old_N, returns_N = numbers(1).double(), numbers(2).double()
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old_N, returns_N, share)[0], (values_N,))


def test_what_is_outside_the_mask_cannot_be_seen() -> None:
    share = whole(LENGTHS, MASK)
    values_N = torch.where(share.mask_N, numbers(0), torch.inf).requires_grad_()
    loss, _ = value_loss(values_N, numbers(1), numbers(2), share)
    clean, _ = value_loss(numbers(0), numbers(1), numbers(2), share)
    assert torch.equal(loss, clean)
    assert torch.autograd.grad(loss, values_N)[0].isfinite().all()


def test_half_precision_is_promoted() -> None:
    share, halves = whole(LENGTHS, MASK), [numbers(seed).bfloat16() for seed in range(3)]
    loss, _ = value_loss(*halves, share)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, value_loss(*(x.float() for x in halves), share)[0])


def explained(returns_N: torch.Tensor, values_N: torch.Tensor, mask_N: torch.Tensor) -> float:
    return explained_variance(moments(returns_N, mask_N), moments(returns_N - values_N, mask_N))


def test_explained_variance_by_hand() -> None:
    # Returns 1, 2, 3 have variance 1; residuals 0, 1, 0.5 have 0.25; the tool token is left out.
    returns_N, values_N = torch.tensor([1.0, 9.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 1.0, 2.5])
    mask_N = torch.tensor([1, 0, 1, 1]).bool()
    assert explained(returns_N, values_N, mask_N) == pytest.approx(0.75, abs=1e-5)
    assert explained(returns_N, returns_N, mask_N) == 1
    assert explained(returns_N, torch.full((4,), 7.0), mask_N) == pytest.approx(0, abs=2e-5)
    assert math.isnan(explained(returns_N, values_N, torch.tensor([1, 0, 0, 0]).bool()))


def test_explained_variance_of_few_or_equal_returns() -> None:
    """Two tokens are enough. Where all returns are equal, 1e-5 stands for their variance."""
    all_N = torch.ones(2).bool()
    # Returns 0 and 4 have variance 8; residuals 1 and 3 have 2.
    assert explained(torch.tensor([0.0, 4.0]), torch.tensor([-1.0, 1.0]), all_N) == pytest.approx(
        0.75, abs=1e-5
    )
    equal_N = torch.tensor([1.0, 1.0])
    assert explained(equal_N, torch.tensor([0.0, 1.0]), all_N) == pytest.approx(1 - 0.5 / 1e-5, rel=1e-6)


def test_explained_variance_over_ranks() -> None:
    returns_N, values_N, mask_N = numbers(0), numbers(0) + 0.5 * numbers(1), torch.tensor(MASK).bool()
    halves = [slice(0, 6), slice(6, 10)]
    together = explained_variance(
        combine(moments(returns_N[at], mask_N[at]) for at in halves),
        combine(moments((returns_N - values_N)[at], mask_N[at]) for at in halves),
    )
    assert together == pytest.approx(explained(returns_N, values_N, mask_N), rel=1e-12)
