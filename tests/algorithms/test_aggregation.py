from __future__ import annotations

import pytest
import torch
from steps import LENGTHS, MASK, cut, numbers, whole

from isotrain.algorithms.aggregation import AGGREGATIONS, LossNormalizer

# Losses 1, 2 and 9 (a tool's) of one trajectory, 6 of another, 9 (a tool's) of a third.
LOSS_N = (1.0, 2.0, 9.0, 6.0, 9.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token-mean", (1 + 2 + 6) / 3),
        ("seq-mean-token-sum", ((1 + 2) + 6) / 2),
        ("seq-mean-token-mean", ((1 + 2) / 2 + 6) / 2),
        ("seq-mean-token-sum-norm", ((1 + 2) + 6) / 2 / 10),
    ],
)
def test_by_hand(device_type: str, name: str, expected: float) -> None:
    share = whole([3, 1, 1], [1, 1, 0, 1, 0], horizon=10, device=device_type)
    assert (share.tokens, share.sequences) == (3, 2)
    assert AGGREGATIONS[name](torch.tensor(LOSS_N, device=device_type), share).item() == pytest.approx(
        expected
    )


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("order", [[[0], [1], [2]], [[2, 0], [], [1]], [[1, 2, 0]]])
def test_shares_add_up_however_the_step_is_cut(name: str, order: list[list[int]]) -> None:
    share = whole(LENGTHS, MASK, horizon=10)
    loss_N = numbers(0).requires_grad_()
    together = AGGREGATIONS[name](loss_N, share)
    (gradient_N,) = torch.autograd.grad(together, loss_N)
    total = sum(AGGREGATIONS[name](loss_N[at_N], part) for part, at_N in cut(share, order))
    assert isinstance(total, torch.Tensor)
    torch.testing.assert_close(total, together)
    torch.testing.assert_close(torch.autograd.grad(total, loss_N)[0], gradient_N)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_no_token_counts(device_type: str, name: str) -> None:
    for share in (whole([2, 1], [0, 0, 0], horizon=4, device=device_type), whole([], [], horizon=4)):
        loss_N = torch.full((len(share.mask_N),), torch.nan, device=share.mask_N.device, requires_grad=True)
        loss = AGGREGATIONS[name](loss_N, share)
        loss.backward()
        assert loss.item() == 0 and loss_N.grad is not None and not loss_N.grad.any()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_half_precision_is_promoted(name: str) -> None:
    share = LossNormalizer(torch.ones(4096, dtype=torch.bool), [4096], 4096, 1, 4096)
    loss = AGGREGATIONS[name](torch.full((4096,), 0.1, dtype=torch.bfloat16), share)
    assert loss.dtype == torch.float32
    # A sum in bfloat16 would stop growing at 32: the rounded 0.1 is 0.10009765625.
    expected = 0.10009765625 * (4096 if name == "seq-mean-token-sum" else 1)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_constant_horizon_must_be_given() -> None:
    with pytest.raises(ValueError, match="horizon"):
        AGGREGATIONS["seq-mean-token-sum-norm"](torch.ones(1), whole([1]))
