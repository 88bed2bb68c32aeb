from __future__ import annotations

import math

import pytest
import torch
from steps import LENGTHS, MASK, cut, numbers, whole

from isotrain.algorithms.policy_losses import (
    POLICY_LOSSES,
    cispo,
    clip,
    entropy_bonus,
    gmpo,
    gspo,
    reinforce,
    sapo,
)

LOSSES = pytest.mark.parametrize("name", POLICY_LOSSES)


def gradient(loss: torch.Tensor, logp_N: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, logp_N)[0]


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected", "clipped", "lower", "slope"),
    [
        # max(-A rho, -A clip(rho, 0.8, 1.2)), at most -3 A where A < 0. The slope in logp is -A rho, or 0
        # where a bound is what counts.
        (2.0, 1.0, -2.0, 0, 0, -2.0),
        (2.0, 1.5, -2.4, 1, 0, 0.0),
        (2.0, 0.5, -1.0, 0, 0, -1.0),
        (-2.0, 1.5, 3.0, 0, 0, 3.0),
        (-2.0, 0.5, 1.6, 1, 0, 0.0),
        (-2.0, 5.0, 6.0, 0, 1, 0.0),
        (0.0, 5.0, 0.0, 0, 0, 0.0),
    ],
)
def test_clip_by_hand(
    device_type: str, advantage: float, ratio: float, expected: float, clipped: int, lower: int, slope: float
) -> None:
    logp_N = torch.tensor([math.log(ratio) - 1], device=device_type, requires_grad=True)
    old_N, advantages_N = (torch.tensor([x], device=device_type) for x in (-1.0, advantage))
    loss, metrics = clip(logp_N, old_N, advantages_N, whole([1], device=device_type))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert gradient(loss, logp_N).item() == pytest.approx(slope, rel=1e-6)
    assert metrics["actor/pg_loss"].item() == loss.item()
    assert metrics["actor/pg_clipfrac"].item() == clipped
    assert metrics["actor/pg_clipfrac_lower"].item() == lower
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-math.log(ratio), abs=1e-6)


def test_clip_higher_and_no_dual_clip() -> None:
    logp_N, old_N = torch.tensor([1.25, 5.0]).log(), torch.zeros(2)
    advantages_N, share = torch.tensor([1.0, -1.0]), whole([2])
    # 1.25 is inside 1.28, and 5 is above 3.
    assert clip(logp_N, old_N, advantages_N, share, clip_ratio_high=0.28)[0].item() == pytest.approx(
        (-1.25 + 3) / 2
    )
    assert clip(logp_N, old_N, advantages_N, share, dual_clip=None)[0].item() == pytest.approx((-1.2 + 5) / 2)


def test_cispo_by_hand(device_type: str) -> None:
    # Ratios 1, 2, 1/4 clipped to 1, 1.2, 0.8; log-probs -1, -2, -3; advantages 1, 2, -1:
    # -(1 x 1 x -1) - (1.2 x 2 x -2) - (0.8 x -1 x -3) = 1 + 4.8 - 2.4 = 3.4, a third of it is the mean.
    logp_N = torch.tensor([-1.0, -2.0, -3.0], device=device_type, requires_grad=True)
    old_N = logp_N.detach() - torch.tensor([1.0, 2.0, 0.25], device=device_type).log()
    advantages_N = torch.tensor([1.0, 2.0, -1.0], device=device_type)
    loss, metrics = cispo(logp_N, old_N, advantages_N, whole([3], device=device_type))
    assert loss.item() == pytest.approx(3.4 / 3, rel=1e-6)
    # No token loses its gradient to the clip.
    expected = torch.tensor([-1.0, -2.4, 0.8]) / 3
    torch.testing.assert_close(gradient(loss, logp_N).cpu(), expected)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 3)
    # clip_ratio_low = 1 leaves the lower side open: the last token's weight is then 1/4.
    open_loss, _ = cispo(logp_N, old_N, advantages_N, whole([3], device=device_type), clip_ratio_low=1.0)
    assert open_loss.item() == pytest.approx((1 + 4.8 - 0.75) / 3, rel=1e-6)


def test_reinforce_by_hand() -> None:
    logp_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, metrics = reinforce(logp_N, torch.tensor([-1.5, -2.0]), torch.tensor([3.0, -1.0]), whole([2]))
    assert loss.item() == pytest.approx((3 - 2) / 2)
    assert gradient(loss, logp_N).tolist() == [-1.5, 0.5]
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-0.25)
    assert metrics["actor/pg_clipfrac"].item() == metrics["actor/pg_clipfrac_lower"].item() == 0


def test_gspo_by_hand(device_type: str) -> None:
    # Log-ratios ln 4 and 0 have the mean ln 2: every token's ratio is 2. Tool tokens do not count.
    # A = 1: -clip(2) = -1.2. Second trajectory: ratio 1/2 and A = -1: max(0.5, 0.8) = 0.8.
    log_ratio_N = torch.tensor([4.0, 100.0, 1.0, 0.5], device=device_type).log()
    share = whole([3, 1], [1, 0, 1, 1], device=device_type)
    advantages_N = torch.tensor([1.0, 1.0, 1.0, -1.0], device=device_type)
    loss, metrics = gspo(log_ratio_N, torch.zeros_like(log_ratio_N), advantages_N, share)
    assert loss.item() == pytest.approx((-1.2 + 0.8) / 2, rel=1e-6)
    assert metrics["actor/pg_clipfrac"].item() == 1
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-(math.log(4) + 0 + math.log(0.5)) / 3, rel=1e-6)
    open_loss, _ = gspo(
        log_ratio_N, torch.zeros_like(log_ratio_N), advantages_N, share, clip_ratio_low=0.9, clip_ratio_high=9
    )
    assert open_loss.item() == pytest.approx((-2.0 + 0.5) / 2, rel=1e-6)


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    """The straight-through tokens of a trajectory add up to the gradient of `exp(mean(logp - old))`."""
    logp_N = numbers(0).double().requires_grad_()
    old_N = logp_N.detach() + 0.05 * numbers(1).double()
    advantages_R = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)
    share = whole(LENGTHS, MASK)
    advantages_N = advantages_R.repeat_interleave(torch.tensor(LENGTHS))
    loss, _ = gspo(logp_N, old_N, advantages_N, share)

    expected = torch.zeros((), dtype=torch.float64)
    parts = (x.split(LENGTHS) for x in (logp_N, old_N, share.mask_N))
    for new, old, mask, advantage in zip(*parts, advantages_R, strict=True):
        expected = expected - advantage * (new - old)[mask].mean().exp() / 3
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, logp_N), gradient(expected, logp_N))


def test_gspo_ratio_keeps_its_digits_beside_large_log_ratios() -> None:
    # Log-ratios 1000, -1000 + 2^-9 and 0 have the mean 2^-9 / 3, whose digits a detour over 1000 rounds away.
    logp_N, mean = torch.tensor([1000.0, -1000.0 + 2**-9, 0.0]), 2**-9 / 3
    loss, _ = gspo(logp_N, torch.zeros(3), -torch.ones(3), whole([3]))
    assert loss.item() == pytest.approx(math.exp(mean), rel=1e-7)


def test_gmpo_by_hand(device_type: str) -> None:
    # Tool tokens do not count.
    # A = 1: log-ratios ln 4, which is clipped at 0.4, and -1, which is not: exp(-0.3).
    # A = -1: log-ratios -2, which is clipped at -0.3, and 1, which is not: exp(0.35).
    log_ratio_N = torch.tensor([math.log(4), 9.0, -1.0, -2.0, 1.0], device=device_type, requires_grad=True)
    share = whole([3, 2], [1, 0, 1, 1, 1], device=device_type)
    advantages_N = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], device=device_type)
    options = {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4}
    loss, metrics = gmpo(log_ratio_N, torch.zeros_like(log_ratio_N), advantages_N, share, **options)
    first, second = math.exp(-0.3), math.exp(0.35)
    assert loss.item() == pytest.approx((-first + second) / 2, rel=1e-6)
    # A clipped token has no gradient; the mean over two tokens and two trajectories gives others a quarter.
    expected = torch.tensor([0.0, 0.0, -first / 4, 0.0, second / 4])
    torch.testing.assert_close(gradient(loss, log_ratio_N).cpu(), expected)
    assert metrics["actor/pg_clipfrac"].item() == 0.5


@pytest.mark.parametrize(
    ("advantage", "ratio", "tau"), [(1.0, 2.0, 1.0), (-2.0, 0.5, 1.05), (-1.0, 3.0, 1.05), (3.0, 1.0, 1.0)]
)
def test_sapo_by_hand(device_type: str, advantage: float, ratio: float, tau: float) -> None:
    logp_N = torch.tensor([math.log(ratio)], device=device_type, requires_grad=True)
    old_N, advantages_N = (torch.tensor([x], device=device_type) for x in (0.0, advantage))
    loss, metrics = sapo(logp_N, old_N, advantages_N, whole([1], device=device_type))
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert loss.item() == pytest.approx(-advantage * 4 / tau * gate, rel=1e-6)
    # The published weight: 4 gate (1 - gate), which is 1 where nothing has moved.
    slope = -advantage * ratio * 4 * gate * (1 - gate)
    assert gradient(loss, logp_N).item() == pytest.approx(slope, rel=1e-5)
    assert metrics["actor/pg_clipfrac"].item() == 0


@pytest.mark.parametrize(
    ("divergence", "advantage", "old", "new", "weight"),
    [
        # Total variation |p - q|, at most 0.2 upwards and 0.1 downwards; a token may always come back.
        ("tv", 1.0, 0.5, 0.8, 0.0),
        ("tv", 1.0, 0.5, 0.65, 1.3),
        ("tv", -1.0, 0.5, 0.8, 1.6),
        ("tv", -1.0, 0.5, 0.35, 0.0),
        ("tv", 1.0, 0.5, 0.1, 0.2),
        ("tv", 1.0, 0.001, 0.03, 20.0),  # 30 times as likely
        # KL: 0.223 nats at 0.8 and 0.2, 0.020 at 0.6.
        ("kl", 1.0, 0.5, 0.8, 0.0),
        ("kl", 1.0, 0.5, 0.6, 1.2),
        ("kl", -1.0, 0.5, 0.2, 0.0),
        ("kl", 1.0, 0.5, 0.2, 0.4),
    ],
)
def test_dppo_by_hand(
    device_type: str, divergence: str, advantage: float, old: float, new: float, weight: float
) -> None:
    logp_N = torch.tensor([math.log(new)], device=device_type, requires_grad=True)
    old_N, advantages_N = (torch.tensor([x], device=device_type) for x in (math.log(old), advantage))
    options = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}
    dppo = POLICY_LOSSES[f"dppo-{divergence}"]
    loss, metrics = dppo(logp_N, old_N, advantages_N, whole([1], device=device_type), **options)
    assert loss.item() == pytest.approx(-weight * advantage * math.log(new), rel=1e-5)
    assert gradient(loss, logp_N).item() == pytest.approx(-weight * advantage, rel=1e-5)
    assert metrics["actor/pg_clipfrac"].item() == (weight == 0)
    assert metrics["actor/pg_clipfrac_lower"].item() == (weight == 20)


@LOSSES
def test_on_policy_every_gradient_is_that_of_reinforce(device_type: str, name: str) -> None:
    logp_N = numbers(0, device=device_type).requires_grad_()
    advantages_N, share = numbers(1, device=device_type), whole(LENGTHS, MASK, device=device_type)
    options = {"aggregation": "token-mean"}
    # The old log-probs are the very same tensor: they are a constant nevertheless.
    loss, metrics = POLICY_LOSSES[name](logp_N, logp_N, advantages_N, share, **options)
    expected_N = torch.where(share.mask_N, -advantages_N / share.tokens, 0.0)
    torch.testing.assert_close(gradient(loss, logp_N), expected_N)
    assert metrics["actor/pg_clipfrac"].item() == metrics["actor/ppo_kl"].item() == 0


@pytest.mark.parametrize("name", ["clip", "reinforce"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_gradcheck_where_the_loss_is_smooth(name: str, aggregation: str) -> None:
    # GSPO and CISPO are left out: their gradients are not derivatives of their values, by design.
    logp_N = numbers(0).double().requires_grad_()
    # Distances from the old policy on both sides of the clip, none near its corners or the dual clip's.
    old_N = logp_N.detach() - torch.tensor([0.1, 0.5, 0.0, 0.7, -0.5, -0.1, 2.0, -2.0, 0.3, 0.0]).double()
    advantages_N, share = numbers(1).double(), whole(LENGTHS, MASK, horizon=8)
    assert torch.autograd.gradcheck(
        lambda x: POLICY_LOSSES[name](x, old_N, advantages_N, share, aggregation=aggregation)[0], (logp_N,)
    )


@LOSSES
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("order", [[[0], [1], [2]], [[2, 0], [], [1]]])
def test_shares_of_loss_gradient_and_metrics_add_up(
    name: str, aggregation: str, order: list[list[int]]
) -> None:
    share = whole(LENGTHS, MASK)
    logp_N = numbers(0).requires_grad_()
    old_N, advantages_N, correction_N = numbers(2), numbers(1), numbers(3).exp()
    function, options = POLICY_LOSSES[name], {"aggregation": aggregation}
    loss, metrics = function(logp_N, old_N, advantages_N, share, correction_N=correction_N, **options)
    parts = [
        function(logp_N[at], old_N[at], advantages_N[at], part, correction_N=correction_N[at], **options)
        for part, at in cut(share, order)
    ]
    total = torch.stack([part for part, _ in parts]).sum()
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(gradient(total, logp_N), gradient(loss, logp_N))
    for metric, value in metrics.items():
        torch.testing.assert_close(sum(part[metric] for _, part in parts), value)
        assert not value.requires_grad


@LOSSES
def test_what_is_outside_the_mask_cannot_be_seen(name: str) -> None:
    share = whole(LENGTHS, MASK)
    clean = [numbers(seed) for seed in (0, 1, 2, 3)]
    spoilt = [
        torch.where(share.mask_N, x, bad)
        for x, bad in zip(clean, (-torch.inf, *[torch.nan] * 3), strict=True)
    ]
    results = []
    for logp_N, old_N, advantages_N, correction_N in (clean, spoilt):
        leaf_N = logp_N.clone().requires_grad_()
        loss, metrics = POLICY_LOSSES[name](leaf_N, old_N, advantages_N, share, correction_N=correction_N)
        results.append((loss.detach(), gradient(loss, leaf_N), *metrics.values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not results[0][1][~share.mask_N].any()


@LOSSES
def test_correction_weights_scale_the_tokens_and_bear_no_gradient(name: str) -> None:
    logp_N, old_N, advantages_N = numbers(0).requires_grad_(), numbers(0) + 0.1, numbers(1)
    share, correction_N = whole(LENGTHS, MASK), torch.full((10,), 0.25, requires_grad=True)
    plain, _ = POLICY_LOSSES[name](logp_N, old_N, advantages_N, share)
    corrected, _ = POLICY_LOSSES[name](logp_N, old_N, advantages_N, share, correction_N=correction_N)
    torch.testing.assert_close(corrected, plain / 4)
    corrected.backward()
    assert correction_N.grad is None


@LOSSES
@pytest.mark.parametrize("lengths", [(), (3, 1)], ids=["no tokens", "no written tokens"])
def test_nothing_to_learn_from(name: str, lengths: tuple[int, ...]) -> None:
    share = whole(lengths, [0] * sum(lengths))
    logp_N = numbers(0, sum(lengths)).requires_grad_()
    loss, metrics = POLICY_LOSSES[name](logp_N, logp_N - 1, torch.ones(sum(lengths)), share)
    assert loss.item() == 0 and not gradient(loss, logp_N).any()
    assert all(value.item() == 0 for value in metrics.values())


@LOSSES
@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_extreme_log_ratios_stay_finite(name: str, distance: float) -> None:
    logp_N = torch.tensor([distance, distance], requires_grad=True)
    loss, metrics = POLICY_LOSSES[name](logp_N, torch.zeros(2), torch.tensor([1.0, -1.0]), whole([1, 1]))
    assert loss.isfinite() and gradient(loss, logp_N).isfinite().all()
    assert metrics["actor/ppo_kl"].item() == pytest.approx(math.copysign(20, -distance))


def test_the_ratio_ends_at_exp_20() -> None:
    old_N, advantages_N = torch.zeros(1), torch.tensor([-1.0])
    loss, _ = clip(torch.tensor([30.0]), old_N, advantages_N, whole([1]), dual_clip=None)
    assert loss.item() == pytest.approx(math.exp(20), rel=1e-6)


@LOSSES
def test_half_precision_is_promoted(name: str) -> None:
    share = whole(LENGTHS, MASK)
    halves = [numbers(seed).bfloat16() for seed in (0, 1, 2)]
    loss, metrics = POLICY_LOSSES[name](*halves, share)
    expected, _ = POLICY_LOSSES[name](*(x.float() for x in halves), share)
    assert loss.dtype == torch.float32 and torch.equal(loss, expected)
    assert all(value.dtype == torch.float32 for value in metrics.values())


def test_entropy_bonus_by_hand(device_type: str) -> None:
    entropy_N = torch.tensor([1.0, 9.0, 3.0], device=device_type, requires_grad=True)
    share = whole([3], [1, 0, 1], device=device_type)
    loss, metrics = entropy_bonus(entropy_N, share, coefficient=0.5)
    assert loss.item() == -1.0 and metrics["actor/entropy"].item() == 2.0
    loss.backward()
    assert entropy_N.grad is not None and entropy_N.grad.tolist() == [-0.25, 0.0, -0.25]
    assert entropy_bonus(entropy_N, share)[0].item() == 0
