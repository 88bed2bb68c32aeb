from __future__ import annotations

import math

import pytest
import torch
from steps import LENGTHS, MASK, cut, numbers, whole

from isotrain.algorithms.kl import KL_ESTIMATORS, AdaptiveKl, FixedKl, kl_loss

ESTIMATORS = pytest.mark.parametrize("name", KL_ESTIMATORS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The policy is twice as likely as the reference, then half as likely: d = -ln 2, ln 2.
        ("k1", [math.log(2), -math.log(2)]),
        ("abs", [math.log(2), math.log(2)]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2]),
        ("k3", [0.5 + math.log(2) - 1, 2 - math.log(2) - 1]),
    ],
)
def test_by_hand(device_type: str, name: str, expected: list[float]) -> None:
    logp_N, ref_logp_N = (torch.tensor(p, device=device_type).log() for p in ([0.5, 0.25], [0.25, 0.5]))
    assert KL_ESTIMATORS[name](logp_N, ref_logp_N).tolist() == pytest.approx(expected, rel=1e-6)


@ESTIMATORS
def test_no_divergence_from_oneself(name: str) -> None:
    logp_N = numbers(0)
    assert not KL_ESTIMATORS[name](logp_N, logp_N).any()


@pytest.mark.parametrize(("name", "exact"), [("k1", True), ("k3", True), ("k2", False), ("abs", False)])
def test_which_estimators_are_unbiased(name: str, exact: bool) -> None:
    """The expectation over all tokens of a small vocabulary is the divergence itself for k1 and k3."""
    logp_V, ref_logp_V = numbers(0, 6).log_softmax(0), numbers(1, 6).log_softmax(0)
    divergence = (logp_V.exp() * (logp_V - ref_logp_V)).sum().item()
    estimate = (logp_V.exp() * KL_ESTIMATORS[name](logp_V, ref_logp_V)).sum().item()
    assert (estimate == pytest.approx(divergence, rel=1e-5)) is exact


def test_limits() -> None:
    far_N, ref_N = torch.tensor([100.0, -100.0]), torch.zeros(2)
    assert KL_ESTIMATORS["k1"](far_N, ref_N).tolist() == [20.0, -20.0]
    assert KL_ESTIMATORS["abs"](far_N, ref_N).tolist() == [20.0, 20.0]
    assert KL_ESTIMATORS["k2"](far_N, ref_N).tolist() == [200.0, 200.0]
    # exp(-20) + 20 - 1 = 19 and exp(20) - 21 are both above 10.
    assert KL_ESTIMATORS["k3"](far_N, ref_N).tolist() == [10.0, 10.0]


@ESTIMATORS
def test_gradcheck(name: str) -> None:
    logp_N, ref_logp_N = numbers(0).double().requires_grad_(), numbers(1).double()
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[name](x, ref_logp_N), (logp_N,))


def test_loss_by_hand() -> None:
    # k2 of ln 2 and of ln 4: (ln 2)^2 / 2 and 4 (ln 2)^2 / 2, mean 5/4 (ln 2)^2; the tool token is left out.
    logp_N, ref_logp_N = torch.tensor([2.0, 7.0, 4.0]).log(), torch.zeros(3)
    loss, metrics = kl_loss(logp_N, ref_logp_N, whole([3], [1, 0, 1]), coefficient=0.1, estimator="k2")
    expected = 5 / 4 * math.log(2) ** 2
    assert metrics["actor/kl_loss"].item() == pytest.approx(expected, rel=1e-6)
    assert loss.item() == pytest.approx(0.1 * expected, rel=1e-6)


@ESTIMATORS
def test_loss_shares_add_up_and_do_not_see_beyond_the_mask(name: str) -> None:
    share = whole(LENGTHS, MASK)
    logp_N = torch.where(share.mask_N, numbers(0), torch.nan).requires_grad_()
    spoilt_N = torch.where(share.mask_N, numbers(1), -torch.inf)
    loss, _ = kl_loss(logp_N, spoilt_N, share, estimator=name, aggregation="seq-mean-token-mean")
    total = torch.stack(
        [
            kl_loss(logp_N[at], spoilt_N[at], part, estimator=name, aggregation="seq-mean-token-mean")[0]
            for part, at in cut(share, [[2], [1, 0]])
        ]
    ).sum()
    torch.testing.assert_close(total, loss)
    (gradient_N,) = torch.autograd.grad(loss, logp_N)
    assert gradient_N.isfinite().all() and not gradient_N[~share.mask_N].any()


def test_half_precision_is_promoted() -> None:
    halves = numbers(0).bfloat16(), numbers(1).bfloat16()
    for estimator in KL_ESTIMATORS.values():
        assert torch.equal(estimator(*halves), estimator(*(x.float() for x in halves)))


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        # 1 + clip(kl / 0.1 - 1, -0.2, 0.2) x 1000 / 10000
        (0.1, 1.0),
        (0.11, 1.01),
        (0.5, 1.02),
        (0.0, 0.98),
    ],
)
def test_adaptive_controller_by_hand(kl: float, factor: float) -> None:
    controller = AdaptiveKl(coefficient=0.5, target=0.1, horizon=10_000)
    assert controller.updated(kl, 1000).coefficient == pytest.approx(0.5 * factor)
    assert controller.coefficient == 0.5


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_adaptive_controller_passes_over_what_is_no_number(kl: float) -> None:
    controller = AdaptiveKl(coefficient=0.5, target=0.1, horizon=10_000)
    assert controller.updated(kl, 1000) == controller


def test_fixed_controller_stays() -> None:
    assert FixedKl(0.3).updated(5.0, 1000) == FixedKl(0.3)
