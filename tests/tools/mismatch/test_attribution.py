"""Shares of causes: analytic values, whole sums, and what the two orders say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from isotrain.tools.mismatch.attribution import Attribution, attribute, needed


def experiments_of(
    parts: dict[str, np.ndarray], rest: np.ndarray, sequences: int
) -> dict[frozenset[str], list]:
    """Additive causes: removing one takes its part away."""
    results = {}
    for count in range(len(parts) + 1):
        for removed in itertools.combinations(parts, count):
            left = rest + sum((value for name, value in parts.items() if name not in removed), 0 * rest)
            results[frozenset(removed)] = np.split(left, sequences)
    return results


def shares(result: Attribution) -> dict[str, float]:
    return {s.cause: s.nats for s in result.shares}


def test_independent_normal_causes_get_their_part_of_the_variance() -> None:
    draw = np.random.default_rng(0)
    n, sigma = 64_000, {"a": 0.3, "b": 0.4, "c": 1.2}
    parts = {name: s * draw.standard_normal(n) for name, s in sigma.items()}
    result = attribute(experiments_of(parts, np.zeros(n), 64), list(parts))
    variance = sum(s * s for s in sigma.values())
    assert result.total == pytest.approx(np.sqrt(2 / np.pi * variance), rel=0.01)
    for share in result.shares:
        assert result.part(share) == pytest.approx(sigma[share.cause] ** 2 / variance, abs=0.01)
        assert share.low < share.nats < share.high and not share.shared
    assert result.rest.nats == pytest.approx(0.0, abs=1e-12)


def test_shares_and_rest_add_up_to_the_whole() -> None:
    draw = np.random.default_rng(1)
    order = ["a", "b", "c", "d"]
    # Nothing is additive here: each experiment is something else.
    results = {removed: [draw.standard_normal(n) for n in (3, 7, 5, 9)] for removed in needed(order)}
    result = attribute(results, order)
    whole = np.abs(np.concatenate(results[frozenset()])).mean()
    assert result.total == pytest.approx(whole)
    assert sum(shares(result).values()) + result.rest.nats == pytest.approx(whole)
    for end in ("first", "last"):
        assert sum(getattr(s, end) for s in result.shares) + result.rest.nats == pytest.approx(whole)


def test_rounding_that_is_drawn_anew_is_nobodys_share() -> None:
    """Each experiment in low precision rounds otherwise; only the last one, in float32, does not."""
    draw = np.random.default_rng(2)
    n, fault = 64_000, 0.5 * draw.standard_normal(64_000)
    results = {}
    for removed in needed(order := ["weights", "batch", "dtype"]):
        noise = 0 if "dtype" in removed else draw.standard_normal(n)
        results[removed] = np.split(fault * ("weights" not in removed) + noise, 64)
    result = attribute(results, order)
    for share, part in zip(result.shares, (0.2, 0.0, 0.8), strict=True):
        assert result.part(share) == pytest.approx(part, abs=0.02) and not share.shared
    assert result.rest.nats == 0.0


def test_what_two_causes_do_only_together_is_shared_between_them() -> None:
    together = np.ones(40)
    results = {frozenset(): np.split(together, 4)}
    for removed in ({"a"}, {"b"}, {"a", "b"}):
        results[frozenset(removed)] = np.split(0 * together, 4)
    result = attribute(results, ["a", "b"])
    assert [(s.first, s.last, s.shared) for s in result.shares] == [(1.0, 0.0, True), (0.0, 1.0, True)]
    assert shares(result) == {"a": 0.5, "b": 0.5}


def test_a_cause_that_cancels_another_has_a_negative_share() -> None:
    parts = {"a": np.full(20, 3.0), "b": np.full(20, -1.0)}
    result = attribute(experiments_of(parts, np.zeros(20), 4), ["a", "b"])
    assert result.total == 2.0 and shares(result) == {"a": 3.0, "b": -1.0}


def test_the_interval_of_the_rest_covers_its_mean_over_other_sequences() -> None:
    covered = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        rest = [0.5 + draw.standard_normal() * 0.1 + 0.01 * draw.standard_normal(20) for _ in range(24)]
        covered += (r := attribute({frozenset(): rest}, []).rest).low <= 0.5 <= r.high
    assert covered >= 176  # 190 to be expected of 95 %; a bootstrap over 24 is a little narrow


def test_each_experiment_is_asked_for_once() -> None:
    asked = needed(["a", "b", "c"])
    assert len(asked) == len(set(asked)) == 6
    assert asked[0] == frozenset() and frozenset("abc") in asked


def test_no_tokens_have_no_shares() -> None:
    assert attribute({frozenset(): [np.zeros(0)], frozenset("a"): [np.zeros(0)]}, ["a"]).shares == ()
