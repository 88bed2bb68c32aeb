"""Lengths, stations, data-sheet speeds, transfers and failures against values on paper."""

from __future__ import annotations

import numpy as np
import pytest
from simulate.engine import Clock, Servers
from simulate.hardware import (
    Device,
    Efficiency,
    Failures,
    Model,
    decode_of,
    line_through,
    sequences_at_once,
    training_seconds_per_token,
)
from simulate.lengths import Constant, Empirical, Lognormal, lognormal_of
from simulate.settings import Decode, controller_seconds

SEVEN = Model("7B", 7.0, 7.0, 28, 4, 128)
DEVICE = Device("device", 100.0, 1.0, 80.0)
ALL = Efficiency(bandwidth=1.0, training=1.0, prefill=1.0, token_overhead=0.0, memory=1.0)


def test_events_come_in_order_of_time_and_arrival() -> None:
    clock, seen = Clock(), list[str]()
    clock.at(2.0, lambda: seen.append("late"))
    clock.at(1.0, lambda: seen.append("first"))
    clock.at(1.0, lambda: clock.after(0.5, lambda: seen.append("after")))
    clock.run(lambda: False)
    assert seen == ["first", "after", "late"] and clock.now == 2.0


def test_two_places_serve_three() -> None:
    clock, ends = Clock(), list[float]()
    servers = Servers(clock, 2)
    for _ in range(3):
        servers.serve(1.0, lambda: ends.append(clock.now))
    clock.run(lambda: False)
    assert ends == [1.0, 1.0, 2.0] and servers.busy == 3.0


def test_lengths() -> None:
    random = np.random.default_rng(0)
    assert (Constant(7).draw(random, 2, 3) == 7).all()
    assert set(Empirical((3, 9)).draw(random, 50, 2).ravel().tolist()) == {3, 9}
    lengths_PG = Lognormal(100, 2.0, 500).draw(random, 2000, 4)
    assert lengths_PG.min() >= 1 and lengths_PG.max() == 500
    assert np.median(lengths_PG) == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize(("mean", "truncated"), [(261, 0.02), (589, 0.428), (220, 0.003)])
def test_a_distribution_with_a_mean_and_a_truncated_share(mean: float, truncated: float) -> None:
    lengths_PG = lognormal_of(mean, 1024, truncated).draw(np.random.default_rng(0), 50_000, 4)
    assert lengths_PG.mean() == pytest.approx(mean, rel=0.02)
    assert (lengths_PG == 1024).mean() == pytest.approx(truncated, abs=0.005)


def test_prompts_have_lengths_in_common() -> None:
    apart_PG, alike_PG = (
        np.log(Lognormal(1000, 0.5, 10**6, by_prompt=share).draw(np.random.default_rng(0), 5000, 2))
        for share in (0.0, 0.8)
    )
    assert np.corrcoef(apart_PG.T)[0, 1] == pytest.approx(0.0, abs=0.05)
    assert np.corrcoef(alike_PG.T)[0, 1] == pytest.approx(0.8, abs=0.05)


def test_data_sheet_speeds() -> None:
    """14 GB over 2 TB/s; 14e9 operations over 200 T; 57 KB of cache a token."""
    decode = decode_of(SEVEN, DEVICE, 2, ALL)
    assert decode == Decode(0.007, 7e-5, 4 * 28 * 4 * 128 / 2e12, 7e-5)
    assert training_seconds_per_token(SEVEN, DEVICE, 4, ALL) == pytest.approx(8 * 7e9 / 400e12)
    assert sequences_at_once(SEVEN, DEVICE, 1, 10_000, ALL) == int(66e9 / (57344 * 10_000))
    with pytest.raises(ValueError, match="does not fit"):
        sequences_at_once(Model("big", 100.0, 100.0, 80, 8, 128), DEVICE, 1, 1000, ALL)


def test_a_transfer_through_two_points() -> None:
    transfer = line_through((100.0, 3.0), (300.0, 5.0))
    assert (transfer.fixed, transfer.gb_per_second) == pytest.approx((2.0, 100.0))
    assert transfer.seconds(500.0) == pytest.approx(7.0)
    with pytest.raises(ValueError, match="larger"):
        line_through((100.0, 3.0), (300.0, 2.0))


def test_controller_seconds() -> None:
    # Terms of different sizes: none of them can stand for another.
    seconds = controller_seconds(ranks=100, agents=4, calls=3, own=0.5, per_rank=1e-3, per_agent_call=0.07)
    assert seconds == pytest.approx(0.5 + 0.1 + 0.84)


def test_failures() -> None:
    failures = Failures(hours_between=1000.0, restart_seconds=360.0, engine_seconds=36.0)
    assert failures.an_hour(500) == pytest.approx(0.5)
    # One failure in 7200 s costs 360 s and half of 720 s; saving takes 20 s of each 720 s.
    assert failures.lost_share(500, 700.0, 20.0) == pytest.approx(20 / 720 + 720 / 7200)
    assert failures.lost_share(10**6, 700.0, 20.0) == 1.0
    assert failures.engines_away(100, 8) == pytest.approx(0.8 * 36 / 3600 / 100)
    best = failures.best_interval(500, 20.0)
    assert best == pytest.approx((2 * 20 * 7200) ** 0.5)
    lost = [failures.lost_share(500, interval, 20.0) for interval in (best / 2, best, best * 2)]
    assert lost[1] == min(lost)
