"""pass@k, and intervals and tests whose error rates are what they say, in simulated evaluations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.special import beta as beta_function

from isotrain.tools.evaluate.statistics import compare, estimate, pass_at_k


@pytest.mark.parametrize(("n", "correct", "k"), [(1, 0, 1), (5, 2, 3), (6, 1, 4), (6, 6, 2), (8, 5, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(n: int, correct: int, k: int) -> None:
    subsets = list(itertools.combinations(range(n), k))
    passed = sum(any(response < correct for response in subset) for subset in subsets)
    assert pass_at_k(n, correct, k) == pytest.approx(passed / len(subsets), abs=1e-15)


# How likely rows are to be answered: mostly never, mostly always, anything, all alike.
KINDS = [(0.05, 0.5), (0.5, 0.05), (1.0, 1.0), (50.0, 50.0)]


@pytest.mark.parametrize(("items", "simulated"), [(20, 400), (200, 300)])
@pytest.mark.parametrize(("a", "b"), KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (8, 1), (8, 4)])
def test_the_interval_covers_the_truth_in_95_of_100_evaluations(
    items: int, simulated: int, a: float, b: float, n: int, k: int
) -> None:
    truth = 1 - beta_function(a, b + k) / beta_function(a, b)
    draw, value_of = np.random.default_rng(7), np.array([pass_at_k(n, c, k) for c in range(n + 1)])
    covered = 0
    for _ in range(simulated):
        correct_I = draw.binomial(n, draw.beta(a, b, items))
        result = estimate(value_of[correct_I])
        covered += result.low <= truth <= result.high
    # Three standard errors of the simulation itself.
    assert covered / simulated >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / simulated)


def test_more_responses_to_each_row_narrow_the_interval() -> None:
    draw = np.random.default_rng(0)
    p_I = np.full(100, 0.5)
    widths = [(e := estimate(draw.binomial(n, p_I) / n)).high - e.low for n in (1, 8)]
    assert widths[1] < 0.75 * widths[0]


def test_the_ends_are_those_of_the_exact_binomial_interval() -> None:
    none, every = estimate([0.0] * 10), estimate([1.0] * 10)
    assert none.low == 0.0 and every.high == 1.0
    assert none.high == pytest.approx(1 - every.low) and none.high > 1 - 0.025**0.1 - 1e-12


def test_scores_beyond_the_bounds_have_the_interval_of_student() -> None:
    result = estimate([-3.0, 1.0, 2.0, 8.0])
    assert result.mean == 2.0 and (result.low, result.high) == pytest.approx((-5.2338, 9.2338), abs=1e-3)
    assert estimate([5.0]).high == math.inf


def test_the_paired_test_calls_equal_models_different_in_5_of_100() -> None:
    draw, called, simulated = np.random.default_rng(3), 0, 200
    for _ in range(simulated):
        p_I = draw.beta(1, 1, 40)
        called += compare(draw.binomial(4, p_I) / 4, draw.binomial(4, p_I) / 4).differs
    assert called / simulated <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / simulated)


def test_the_paired_test_is_exact_where_it_can_be_counted() -> None:
    first, second = [0.0] * 8 + [1.0] * 4, [1.0] * 8 + [1.0] * 4
    result = compare(first, second)
    assert (result.better, result.worse, result.differs) == (8, 0, True)
    assert result.p_value == pytest.approx(2 / 2**8, abs=0.002)
    assert result.difference.mean == pytest.approx(8 / 12) and result.difference.low > 0
    same = compare(first, first)
    assert same.p_value == 1.0 and not same.differs and same.difference.mean == 0.0
