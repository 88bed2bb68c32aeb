from __future__ import annotations

import math

import pytest
import torch
from steps import LENGTHS, MASK, cut, numbers, whole

from isotrain.algorithms.mismatch import Mismatch, combine, mismatch, rollout_correction

# Ratios 4, (a tool's), 1/4 of one trajectory, 3/2 of another.
RATIO_N = (4.0, 100.0, 0.25, 1.5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2, 0, 0.25, 1.5]),
        ({"lower": 0.5}, [2, 0, 0.5, 1.5]),
        ({"mode": "mask"}, [0, 0, 0, 1.5]),
        ({"mode": "mask", "upper": 5.0}, [4, 0, 0.25, 1.5]),
        ({"mode": "mask", "upper": 5.0, "lower": 0.5}, [4, 0, 0, 1.5]),
        # The products are 4 x 1/4 = 1 and 3/2.
        ({"level": "sequence"}, [1, 0, 1, 1.5]),
        ({"level": "sequence", "upper": 1.25}, [1, 0, 1, 1.25]),
        ({"level": "sequence", "upper": 1.25, "mode": "mask"}, [1, 0, 1, 0]),
        # The geometric means are sqrt(4 x 1/4) and 3/2.
        ({"level": "geometric", "upper": 1.25}, [1, 0, 1, 1.25]),
        ({"level": "off", "reject": {"token_k1": (0.25, 3.9)}}, [0, 0, 1, 1]),
        ({"level": "off", "reject": {"token_k2": (0, math.log(3.9) ** 2 / 2)}}, [0, 0, 0, 1]),
        # 4 - 1 - log 4 = 1.61, 1/4 - 1 + log 4 = 0.64, 1/2 - log 3/2 = 0.09.
        ({"level": "off", "reject": {"token_k3": (0, 0.65)}}, [0, 0, 1, 1]),
        ({"level": "off", "reject": {"seq_sum_k1": (0.9, 1.1)}}, [1, 0, 1, 0]),
        ({"level": "off", "reject": {"seq_mean_k3": (0, 1.12)}}, [0, 0, 0, 1]),
        ({"level": "off", "reject": {"seq_mean_k3": (0, 1.13)}}, [1, 0, 1, 1]),
        ({"level": "off", "reject": {"seq_sum_k3": (0, 2.24)}}, [0, 0, 0, 1]),
        ({"level": "off", "reject": {"seq_max_k3": (0, 1.62), "token_k1": (0.5, 5.0)}}, [1, 0, 0, 1]),
        ({"reject": {"seq_mean_k1": (0.9, 1.1)}}, [2, 0, 0.25, 0]),
    ],
)
def test_by_hand(device_type: str, options: dict[str, object], expected: list[float]) -> None:
    share = whole([3, 1], [1, 0, 1, 1], device=device_type)
    logp_N = torch.tensor(RATIO_N, device=device_type).log() - 3
    weights_N, metrics = rollout_correction(logp_N, torch.full_like(logp_N, -3.0), share, **options)  # type: ignore[arg-type]
    assert weights_N.tolist() == pytest.approx(expected, rel=1e-5)
    if options.get("level") == "off":
        rejected = (3 - sum(expected)) / 3
        assert metrics["rollout_corr/rollout_rs_masked_fraction"].item() == pytest.approx(rejected)
    elif "reject" not in options:
        assert metrics["rollout_corr/rollout_is_mean"].item() == pytest.approx(sum(expected) / 3, rel=1e-5)


def test_rejects_what_is_no_number_and_not_a_trajectory_without_tokens() -> None:
    share, logp_N = whole([2, 0, 1], [1, 1, 1]), torch.tensor([math.nan, 0.0, 0.0])
    for name, expected in (("token_k1", [0, 1, 1]), ("seq_mean_k1", [0, 0, 1]), ("seq_max_k3", [0, 0, 1])):
        reject = {name: (0.5 if name.endswith("k1") else 0.0, 2.0)}
        weights_N, _ = rollout_correction(logp_N, torch.zeros(3), share, level="off", reject=reject)
        assert weights_N.tolist() == expected, name


def test_how_many_are_outside() -> None:
    share, logp_N = whole([3, 1], [1, 0, 1, 1]), torch.tensor(RATIO_N).log()
    _, metrics = rollout_correction(logp_N, torch.zeros(4), share)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"].item() == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"].item() == pytest.approx(1 / 3)


def test_the_same_policy_needs_no_correction_and_weights_are_constants() -> None:
    share, logp_N = whole(LENGTHS, MASK), numbers(0).requires_grad_()
    weights_N, _ = rollout_correction(logp_N, logp_N, share)
    assert torch.equal(weights_N, share.mask_N.float()) and not weights_N.requires_grad


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_add_up_and_weights_do_not_see_their_neighbours(level: str) -> None:
    share, logp_N, rollout_N = whole(LENGTHS, MASK), numbers(0), numbers(1)
    weights_N, metrics = rollout_correction(logp_N, rollout_N, share, level=level)  # type: ignore[arg-type]
    totals = dict.fromkeys(metrics, 0.0)
    for part, at in cut(share, [[2], [1, 0]]):
        alone, shares = rollout_correction(logp_N[at], rollout_N[at], part, level=level)  # type: ignore[arg-type]
        assert torch.equal(alone, weights_N[at])
        totals = {name: total + shares[name].item() for name, total in totals.items()}
    assert totals == pytest.approx({name: value.item() for name, value in metrics.items()})


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_extremes_stay_finite(level: str) -> None:
    logp_N = torch.tensor([1e4, -1e4, 1e4])
    weights_N, _ = rollout_correction(logp_N, torch.zeros(3), whole([1, 1, 1]), level=level)  # type: ignore[arg-type]
    assert weights_N.tolist() == pytest.approx([2.0, math.exp(-20), 2.0])


def test_mismatch_by_hand(device_type: str) -> None:
    # Differences 0.1, 0.3, 0.2 (and a tool's): mean 0.2, squared deviations 0.02, so std = 0.1.
    # Trained 0.5, 0.9, 0.1, mean 0.5; rollout 0.4, 0.6, 0.3, mean 1.3/3. Deviations (0, 0.4, -0.4) and
    # (-0.1, 0.5, -0.4)/3: correlation (0.2 + 0.16)/3 / sqrt(0.32 x 0.42/9).
    trained_N = torch.tensor([0.5, 0.9, 1.0, 0.1], device=device_type).log()
    rollout_N = torch.tensor([0.4, 0.6, 0.0, 0.3], device=device_type).log()
    mask_N = torch.tensor([1, 1, 0, 1], device=device_type).bool()
    metrics = mismatch(trained_N, rollout_N, mask_N).metrics()
    assert metrics == pytest.approx(
        {
            "training/rollout_logp_diff_mean": (math.log(5 / 4) + math.log(3 / 2) + math.log(3)) / 3,
            "training/rollout_probs_diff_mean": 0.2,
            # KL of the engine's to the trained policy by k1 and k3, and the variance of the ratios.
            "rollout_corr/kl": -(math.log(5 / 4) + math.log(3 / 2) - math.log(3)) / 3,
            "rollout_corr/k3_kl": (5 / 4 + 3 / 2 + 1 / 3 - math.log(5 / 4 * 3 / 2 / 3)) / 3 - 1,
            "rollout_corr/chi2_token": (25 / 16 + 9 / 4 + 1 / 9) / 3 - 1,
            "training/rollout_probs_diff_max": 0.3,
            "training/rollout_probs_diff_std": 0.1,
            "training/rollout_actor_probs_pearson_corr": 0.12 / math.sqrt(0.32 * 0.42 / 9),
        },
        rel=1e-6,
    )


def test_mismatch_equals_torch_and_its_parts() -> None:
    trained_N, rollout_N = (
        numbers(0, 200).sigmoid().log(),
        numbers(0, 200).sigmoid().log() + 0.01 * numbers(1, 200),
    )
    mask_N = numbers(2, 200) > 0
    together = mismatch(trained_N, rollout_N, mask_N)
    p, q = trained_N[mask_N].double().exp(), rollout_N[mask_N].double().exp()
    metrics = together.metrics()
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx((p - q).abs().std().item(), rel=1e-9)
    correlation = torch.corrcoef(torch.stack([p, q]))[0, 1].item()
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(correlation, rel=1e-9)
    parts = [slice(0, 50), slice(50, 50), slice(50, 200)]
    combined = combine(mismatch(trained_N[at], rollout_N[at], mask_N[at]) for at in parts)
    assert combined == pytest.approx(together, rel=1e-12)


@pytest.mark.parametrize("tokens", [0, 1])
def test_too_few_tokens_for_a_figure(tokens: int) -> None:
    mask_N = torch.arange(3) < tokens
    metrics = mismatch(-torch.ones(3), -torch.ones(3), mask_N).metrics()
    assert math.isnan(metrics["training/rollout_probs_diff_std"])
    assert math.isnan(metrics["training/rollout_actor_probs_pearson_corr"])
    assert math.isnan(metrics["training/rollout_probs_diff_mean"]) is (tokens == 0)


def test_half_precision_is_promoted() -> None:
    halves = numbers(0, 5).sigmoid().log().bfloat16(), numbers(1, 5).sigmoid().log().bfloat16()
    mask_N = torch.ones(5, dtype=torch.bool)
    expected: Mismatch = mismatch(*(x.float() for x in halves), mask_N)
    assert mismatch(*halves, mask_N) == expected


@pytest.mark.parametrize("constant", ["trained", "rollout"])
def test_constant_probabilities_have_no_correlation(constant: str) -> None:
    flat_N, uneven_N = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.5, 0.25]).log()
    given = (flat_N, uneven_N) if constant == "trained" else (uneven_N, flat_N)
    metrics = mismatch(*given, torch.ones(2).bool()).metrics()
    assert math.isnan(metrics["training/rollout_actor_probs_pearson_corr"])
