"""Losses over preferences: analytic anchors, values worked by hand, and sums that do not depend on the cut.

P: pairs, S: responses, N: ends of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from isotrain.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    PairLosses,
    Side,
    calibration_sums,
    dpo,
    ipo,
    kto,
    orpo,
    pair_metrics,
    prm,
    reference_point,
    rm,
    shares,
    simpo,
    two_classes,
)

LN2 = math.log(2)


def side(logp: list[float], ref: list[float] | None, tokens: list[int], device: str = "cpu") -> Side:
    def tensor(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, device=device)

    return Side(tensor(logp).requires_grad_(), None if ref is None else tensor(ref), tensor(tokens))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"length_averaged": True}, {"beta": 3.0}])
def test_dpo_is_ln_2_where_policy_and_reference_are_the_same(
    options: dict[str, Any], device_type: str
) -> None:
    chosen = side([-5.0, -40.0], [-5.0, -40.0], [3, 9], device_type)
    rejected = side([-7.0, -1.0], [-7.0, -1.0], [2, 1], device_type)
    preference = dpo(chosen, rejected, **options)
    assert preference.loss_P.tolist() == pytest.approx([LN2, LN2], rel=1e-7)
    assert preference.chosen_P.tolist() == preference.rejected_P.tolist() == [0.0, 0.0]
    loss, metrics = shares(preference, 2)
    assert loss.item() == pytest.approx(LN2, rel=1e-7)
    assert pair_metrics({name: value.item() for name, value in metrics.items()}) == {
        "accuracy": 0.0,
        "margin": 0.0,
        "chosen_reward": 0.0,
        "rejected_reward": 0.0,
        "chosen_reward_std": 0.0,
        "rejected_reward_std": 0.0,
        "calibration_error": 0.0,
    }


def test_dpo_by_hand(device_type: str) -> None:
    chosen = side([-5.0], [-6.0], [2], device_type)
    rejected = side([-9.0], [-7.0], [4], device_type)
    preference = dpo(chosen, rejected, beta=0.5)
    assert preference.loss_P.item() == pytest.approx(-math.log(sigmoid(1.5)))
    assert (preference.chosen_P.item(), preference.rejected_P.item()) == (0.5, -1.0)
    smooth = dpo(chosen, rejected, beta=0.5, label_smoothing=0.1).loss_P.item()
    assert smooth == pytest.approx(-0.9 * math.log(sigmoid(1.5)) - 0.1 * math.log(sigmoid(-1.5)))
    averaged = dpo(chosen, rejected, beta=0.5, length_averaged=True).loss_P.item()
    assert averaged == pytest.approx(-math.log(sigmoid(0.5 * (1 / 2 + 2 / 4))))
    preference.loss_P.sum().backward()
    assert chosen.logp_P.grad is not None and rejected.logp_P.grad is not None
    assert chosen.logp_P.grad.item() == pytest.approx(-0.5 * sigmoid(-1.5))
    assert rejected.logp_P.grad.item() == pytest.approx(0.5 * sigmoid(-1.5))


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_ipo(beta: float, device_type: str) -> None:
    same = side([-5.0], [-5.0], [3], device_type)
    assert ipo(same, same, beta=beta).loss_P.item() == pytest.approx(1 / (4 * beta**2))
    chosen, rejected = (
        side([-5.0], [-6.0], [2], device_type),
        side([-9.0], [-7.0], [4], device_type),
    )
    assert ipo(chosen, rejected, beta=beta).loss_P.item() == pytest.approx((3 - 1 / (2 * beta)) ** 2)
    averaged = ipo(chosen, rejected, beta=beta, length_averaged=True).loss_P.item()
    assert averaged == pytest.approx((1 - 1 / (2 * beta)) ** 2)


def test_simpo_by_hand(device_type: str) -> None:
    chosen, rejected = side([-4.0], None, [2], device_type), side([-9.0], None, [3], device_type)
    preference = simpo(chosen, rejected, beta=2.0, margin=0.5)
    assert preference.loss_P.item() == pytest.approx(-math.log(sigmoid(2.0 * (-2 + 3) - 0.5)))


@pytest.mark.parametrize("likely", [-1e-3, -0.1, -2.0, -30.0])
def test_orpo_by_hand(likely: float, device_type: str) -> None:
    chosen, rejected = side([2 * likely], None, [2], device_type), side([-9.0], None, [3], device_type)
    preference = orpo(chosen, rejected, beta=0.3)
    odds = (likely - math.log(-math.expm1(likely))) - (-3 - math.log(-math.expm1(-3)))
    assert preference.loss_P.item() == pytest.approx(-likely - 0.3 * math.log(sigmoid(odds)), rel=1e-5)
    assert preference.chosen_P.item() == pytest.approx(0.3 * likely)
    assert preference.rejected_P.item() == pytest.approx(0.3 * -3)
    preference.loss_P.sum().backward()
    assert chosen.logp_P.grad is not None and chosen.logp_P.grad.isfinite().all()


def test_a_certain_response_has_finite_odds() -> None:
    chosen = side([0.0], None, [2])
    preference = orpo(chosen, side([-9.0], None, [3]))
    preference.loss_P.sum().backward()
    assert preference.loss_P.isfinite().all()
    assert chosen.logp_P.grad is not None and chosen.logp_P.grad.isfinite().all()


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_every_loss_prefers_the_chosen_and_adds_up(name: str, device_type: str) -> None:
    draw = torch.Generator().manual_seed(1)
    logp_P = [-20 * torch.rand(6, generator=draw) - 1 for _ in range(4)]
    tokens_P = [torch.randint(1, 9, (6,), generator=draw) for _ in range(2)]

    def loss(part: slice) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
        policy = [x[part].to(device_type).requires_grad_() for x in logp_P[:2]]
        sides = [
            Side(p, r[part].to(device_type), t[part].to(device_type))
            for p, r, t in zip(policy, logp_P[2:], tokens_P, strict=True)
        ]
        value, metrics = shares(PREFERENCE_LOSSES[name](*sides), 6)
        value.backward()
        grads = [p.grad for p in policy if p.grad is not None]
        return value.detach(), grads, metrics

    whole, (chosen, rejected), metrics = loss(slice(None))
    if name != "ipo":  # which pulls back a margin that is too large
        assert (chosen < 0).all() and (rejected > 0).all(), "more of the chosen, less of the rejected"
    first, second = loss(slice(0, 2)), loss(slice(2, None))
    torch.testing.assert_close(first[0] + second[0], whole)
    torch.testing.assert_close(torch.cat([first[1][0], second[1][0]]), chosen)
    for key, value in metrics.items():
        torch.testing.assert_close(first[2][key] + second[2][key], value)


@pytest.mark.parametrize(("desirable_weight", "undesirable_weight"), [(1.0, 1.0), (1.33, 0.7)])
def test_kto_is_half_its_weight_where_nothing_was_learnt(
    desirable_weight: float, undesirable_weight: float, device_type: str
) -> None:
    logp_S = torch.tensor([-3.0, -50.0], device=device_type)
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    for desirable, weight in ((True, desirable_weight), (False, undesirable_weight)):
        desirable_S = torch.full((2,), desirable, device=device_type)
        loss, _ = kto(logp_S, logp_S, desirable_S, kl=0.0, responses=2, **weights)
        assert loss.item() == pytest.approx(weight / 2, rel=1e-7)
    assert reference_point(0.0, 8) == 0.0


def test_kto_by_hand(device_type: str) -> None:
    logp_S = torch.tensor([-3.0, -5.0], device=device_type, requires_grad=True)
    ref_S = torch.tensor([-4.0, -4.0], device=device_type)
    desirable_S = torch.tensor([True, False], device=device_type)
    loss, metrics = kto(
        logp_S,
        ref_S,
        desirable_S,
        kl=0.25,
        responses=2,
        beta=0.5,
        desirable_weight=1.5,
        undesirable_weight=0.5,
    )
    expected = 1.5 * (1 - sigmoid(0.5 * (1 - 0.25))) + 0.5 * (1 - sigmoid(0.5 * (0.25 + 1)))
    assert loss.item() == pytest.approx(expected / 2)
    assert {name: value.item() for name, value in metrics.items()} == {
        "chosen_reward_share": 0.25,
        "rejected_reward_share": -0.25,
        "chosen_square_share": 0.125,
        "rejected_square_share": 0.125,
        "chosen_share": 0.5,
        "rejected_share": 0.5,
    }
    loss.backward()
    assert logp_S.grad is not None and logp_S.grad[0] < 0 < logp_S.grad[1]


def test_the_reference_point_is_never_negative_and_needs_no_responses() -> None:
    assert reference_point(3.0, 4) == 0.75
    assert reference_point(-3.0, 4) == 0.0 and reference_point(0.0, 0) == 0.0


def test_rm(device_type: str) -> None:
    chosen_P = torch.tensor([1.0, 0.0], device=device_type)
    rejected_P = torch.tensor([-0.5, 0.0], device=device_type)
    preference = rm(chosen_P, rejected_P)
    assert preference.loss_P.tolist() == pytest.approx([-math.log(sigmoid(1.5)), LN2])
    torch.testing.assert_close(rm(chosen_P, rejected_P, loss="logexp").loss_P, preference.loss_P)
    margin_P = torch.tensor([0.5, 2.0], device=device_type)
    assert rm(chosen_P, rejected_P, margin_P=margin_P).loss_P.tolist() == pytest.approx(
        [-math.log(sigmoid(1.0)), -math.log(sigmoid(-2.0))]
    )
    centred = rm(chosen_P, rejected_P, centre=0.1).loss_P - preference.loss_P
    assert centred.tolist() == pytest.approx([0.1 * 0.25, 0.0], abs=1e-7)


def test_prm_hard_and_soft(device_type: str) -> None:
    logits_NC = torch.tensor([[0.0, 0.0], [1.0, 3.0], [2.0, -1.0]], device=device_type)
    labels_N = torch.tensor([1.0, 0.0, 0.25], device=device_type)
    loss, metrics = prm(*two_classes(logits_NC), labels_N, steps=3)
    good = [0.5, sigmoid(2.0), sigmoid(-3.0)]
    parts = [-(1 - y) * math.log(1 - p) - y * math.log(p) for y, p in zip([1, 0, 0.25], good, strict=True)]
    assert loss.item() == pytest.approx(sum(parts) / 3)
    assert metrics["accuracy"].item() == pytest.approx(1 / 3)
    # Among a whole vocabulary, what other tokens take is lost for both.
    logp_NC = torch.log_softmax(torch.cat([logits_NC, torch.zeros(3, 5, device=device_type)], 1), -1)
    other, same = prm(logp_NC[:, 0], logp_NC[:, 1], labels_N, steps=3)
    lost = logp_NC[:, :2].logsumexp(1).mean()
    torch.testing.assert_close(other, loss - lost)
    assert lost < -0.1 and same["accuracy"] == metrics["accuracy"]


def test_half_precision_is_widened(device_type: str) -> None:
    chosen = side([-300.0], [-300.25], [3], device_type)
    rejected = side([-200.0], [-200.0], [2], device_type)
    half = [
        Side(s.logp_P.bfloat16(), None if s.ref_logp_P is None else s.ref_logp_P.bfloat16(), s.tokens_P)
        for s in (chosen, rejected)
    ]
    assert dpo(*half).loss_P.dtype == torch.float32


@pytest.mark.parametrize(("items", "values"), [(1, 0), (2, 1)])
@pytest.mark.parametrize(
    "loss",
    [
        lambda own, few: rm(own, own, margin_P=few),
        lambda own, few: rm(own, few),
        lambda own, few: Side(own, few, own.long()),
        lambda own, few: Side(few, None, own.long()),
        lambda own, few: shares(ipo(Side(own, own, own), Side(few, few, few)), 2),
        lambda own, few: kto(own, few, own.bool(), kl=0.0, responses=2),
        lambda own, few: kto(own, own, few.bool(), kl=0.0, responses=2),
        lambda own, few: prm(own, own, few, 2),
        lambda own, few: calibration_sums(few, own.bool(), 2),
    ],
)
def test_values_of_other_items_are_refused(loss: Callable[..., Any], items: int, values: int) -> None:
    """torch would stretch one value over two items, and reduce one item to none where there is no value."""
    loss(torch.zeros(items), torch.zeros(items))
    with pytest.raises(AssertionError, match="values of the same items have shapes"):
        loss(torch.zeros(items), torch.zeros(values))


def test_shares_of_a_step_by_hand(device_type: str) -> None:
    """Two pairs of a step of four, one of them won."""
    chosen_P, rejected_P = (torch.tensor(x, device=device_type) for x in ([3.0, 1.0], [1.0, 2.0]))
    loss, metrics = shares(PairLosses(torch.tensor([0.5, 1.5], device=device_type), chosen_P, rejected_P), 4)
    assert loss.item() == 0.5
    expected = {"accuracy": 0.25, "margin": 0.25, "chosen_reward": 1.0, "rejected_reward": 0.75}
    assert {name: metrics[name].item() for name in expected} == expected
