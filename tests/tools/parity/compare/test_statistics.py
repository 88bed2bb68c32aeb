"""Statistics of two curves: values worked by hand, and what they tell apart."""

from __future__ import annotations

import numpy as np
import pytest

from isotrain.tools.parity.compare.statistics import apart, correlation, throughput

STEPS = np.arange(1, 101)


def curve(seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return 2 * np.exp(-STEPS / 30) + draw.normal(0, 0.05, len(STEPS))


def test_distances_equal_a_sum_by_hand() -> None:
    found = apart(np.array([1, 2, 4]), np.array([2.0, 1.0, 0.5]), np.array([2.0, 1.1, 0.2]))
    assert found.mean_absolute == pytest.approx((0 + 0.1 + 0.3) / 3)
    assert found.mean_relative == pytest.approx((0 + 0.1 + 0.6) / 3)
    assert found.first == 0.0 and found.largest == pytest.approx(0.3) and found.largest_at == 4
    assert found.signed_mean == pytest.approx((0.1 - 0.3) / 3)
    # The changes are -1, -0.5 against -0.9, -0.9: the second ones do not vary.
    assert found.change_correlation is None
    # A flat line at 7/6 is 5/6, 1/6 and 4/6 away.
    assert found.share_of_flat == pytest.approx((0.4 / 3) / (10 / 18))


def test_a_curve_equals_itself() -> None:
    found = apart(STEPS, curve(), curve())
    assert found.mean_absolute == found.largest == found.signed_mean == 0.0
    assert found.parts_at is None and found.change_correlation == pytest.approx(1.0)


def test_finds_where_curves_part() -> None:
    other = curve() + 1e-5
    other[40:] += 0.05
    assert apart(STEPS, curve(), other).parts_at == 41
    spike = curve()
    spike[40] += 0.05
    assert apart(STEPS, curve(), spike).parts_at is None, "one step is not a parting"


def test_other_data_is_told_apart_where_the_published_rule_is_not() -> None:
    """Another order of the same data: the means are close, the changes have nothing to do with each other."""
    found = apart(STEPS, curve(0), curve(1))
    assert found.change_correlation is not None and abs(found.change_correlation) < 0.5
    honest = apart(STEPS, curve(0), curve(0) + 1e-4 * np.random.default_rng(5).normal(size=100))
    assert honest.change_correlation is not None and honest.change_correlation > 0.999
    assert found.share_of_flat is not None and honest.share_of_flat is not None
    assert found.share_of_flat > 100 * honest.share_of_flat


def test_zero_and_flat_references_have_no_relative_error() -> None:
    found = apart(np.array([1, 2]), np.array([0.0, 0.0]), np.array([0.1, 0.1]))
    assert found.mean_relative is None and found.share_of_flat is None and found.change_correlation is None
    one = apart(np.array([7]), np.array([1.0]), np.array([1.5]))
    assert (one.mean_absolute, one.parts_at, one.largest_at) == (0.5, None, 7)


def test_computes_correlation_and_throughput() -> None:
    a = np.array([1.0, 2.0, 3.0])
    assert correlation(a, -a) == pytest.approx(-1.0) and correlation(a[:1], a[:1]) is None
    ratio = throughput(np.array([100.0, 100.0]), np.array([50.0, 70.0]))
    assert ratio.ratio == pytest.approx(0.6) and ratio.inverse == pytest.approx(1 / 0.6)
