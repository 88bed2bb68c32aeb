"""How far two metrics are apart: by hand where that can be done, by simulation where it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from isotrain.tools.parity.compare.effects import (
    LAST,
    WHOLE,
    Effect,
    effect_of_curves,
    effect_of_runs,
)
from isotrain.tools.parity.compare.noise import WINDOWS, window_means, windows_of

STEPS = 200
AT = np.arange(STEPS)
LEARNING = 0.2 + 0.6 * (1 - np.exp(-AT / 60))
SLOWER = 0.2 + 0.6 * (1 - np.exp(-AT / 120))


def remembering(draw: np.random.Generator, steps: int, memory: float, size: float) -> np.ndarray:
    """Noise of which each step keeps a share of the one before."""
    values = np.empty(steps)
    last = draw.normal()
    for step in range(steps):
        last = memory * last + np.sqrt(1 - memory**2) * draw.normal()
        values[step] = last
    return size * values


def rewards(candidate: np.ndarray, seed: int, memory: float = 0.6, size: float = 0.03) -> Effect:
    draw = np.random.default_rng(seed)
    a, b = (curve + remembering(draw, STEPS, memory, size) for curve in (LEARNING, candidate))
    return effect_of_curves("reward", "reward", 0.04, a, b)


def test_windows_are_means() -> None:
    found = windows_of(10)
    assert found.names == WINDOWS and np.allclose(found.weights_WS.sum(axis=1), 1)
    assert (found.weights_WS @ np.arange(10.0))[[0, -1]] == pytest.approx([4.5, 8.5])
    assert np.allclose(windows_of(1).weights_WS, 1)


@pytest.mark.parametrize("candidate", [LEARNING - 0.1, SLOWER], ids=["0.1 lower", "half as fast"])
def test_a_worse_learner_is_different_in_each_of_100(candidate: np.ndarray) -> None:
    found = [rewards(candidate, seed).verdict for seed in range(100)]
    assert found.count("different") >= 99


def test_an_honest_rerun_is_not_different() -> None:
    found = [rewards(LEARNING, seed, memory).verdict for memory in (0.3, 0.9) for seed in range(100)]
    assert found.count("different") <= 2


def test_quiet_reruns_are_equivalent() -> None:
    assert all(rewards(LEARNING, seed, 0.5, 0.01).verdict == "equivalent" for seed in range(20))


def test_a_difference_at_the_end_alone_is_found() -> None:
    late = LEARNING - 0.15 * (AT >= 150)
    found = rewards(late, 1, 0.3, 0.02)
    assert found.verdict == "different" and found.worst.window == LAST


@pytest.mark.parametrize("flat", ["candidate", "reference"])
def test_a_flat_line_is_different_where_its_mean_is_not(flat: str) -> None:
    draw = np.random.default_rng(0)
    curve = 2 + 0.1 * draw.normal(size=STEPS)
    line = np.full(STEPS, curve.mean())
    a, b = (curve, line) if flat == "candidate" else (line, curve)
    found = effect_of_curves("loss", "loss", 0.02, a, b)
    assert found.verdict == "different" and f"the {flat}'s curve is flat" in found.reason


def test_a_reward_at_its_top_is_no_flat_line() -> None:
    """Most of its steps are 1.0: it trained."""
    top = np.where(AT % 5 == 0, 0.9, 1.0)
    almost = np.where(AT % 2 == 0, 0.95, 1.0)
    found = effect_of_curves("reward", "reward", 0.04, top, almost)
    assert not found.reason


def test_equal_curves_have_no_difference() -> None:
    found = effect_of_curves("loss", "loss", 0.02, LEARNING, LEARNING)
    whole = found.of(WHOLE)
    assert found.verdict == "equivalent" and whole.difference == 0 and whole.chance == 1
    assert whole.interval is not None and abs(whole.interval.high) < 1e-6


def test_few_steps_can_be_alike_and_never_differ() -> None:
    """Differences 0.1 and 0.2: t(1) of 97.5 % is 12.706, times a standard deviation of 0.0707."""
    found = effect_of_curves("loss", "loss", 0.02, np.array([2.0, 1.0]), np.array([2.1, 1.2]))
    whole = found.of(WHOLE)
    assert found.verdict == "inconclusive" and whole.interval is not None
    assert whole.interval.high == pytest.approx(0.15 + 12.7062 * np.sqrt(0.005), rel=1e-5)
    close = effect_of_curves("loss", "loss", 0.02, np.array([2.0, 1.0]), np.array([2.0 + 1e-7, 1.0]))
    assert close.verdict == "equivalent"
    single = effect_of_curves("loss", "loss", 0.02, np.array([2.0]), np.array([2.1]))
    assert single.verdict == "inconclusive" and single.of(WHOLE).interval is None


def test_long_curves_are_thinned_and_keep_their_mean() -> None:
    draw = np.random.default_rng(0)
    error = 0.5 + draw.normal(size=100_001)
    found = window_means(error)[0]
    assert found.value == pytest.approx(error.mean()) and found.interval is not None
    assert found.interval.low < 0.5 < found.interval.high
    # White noise of size 1 over 100,001 steps: a standard error of 0.0032.
    assert 0.006 < found.interval.high - found.interval.low < 0.03


def test_noise_that_remembers_widens_the_interval() -> None:
    draw = np.random.default_rng(0)
    widths = []
    for memory in (0.0, 0.9):
        found = window_means(remembering(draw, 2000, memory, 1.0))[0]
        assert found.interval is not None
        widths.append(found.interval.high - found.interval.low)
    assert widths[1] > 3 * widths[0]  # sqrt(19) in theory


def test_the_interval_holds_the_truth() -> None:
    """95 % of the time, in the middle of the range of what noise may be."""
    draw = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        interval = window_means(remembering(draw, STEPS, 0.6, 1.0))[0].interval
        assert interval is not None
        held += interval.low < 0 < interval.high
    assert held >= 184  # of 190 expected


def runs(*levels: float) -> list[np.ndarray]:
    return [np.full(8, level) for level in levels]


def test_interval_of_pairs_equals_a_sum_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1/sqrt(3), t(2) of 97.5 % = 4.3027."""
    found = effect_of_runs("loss", "loss", 10.0, runs(0, 0, 0), runs(1, 2, 3), paired=True)
    whole = found.of(WHOLE)
    assert whole.difference == 2.0 and whole.interval is not None
    assert whole.interval.high - 2.0 == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert found.verdict == "equivalent" and found.evidence == "3 pairs of runs with the same seeds"


def test_unpaired_runs_by_hand() -> None:
    """Welch's test, as scipy has it."""
    from scipy import stats

    a, b = [0.0, 1.0, 2.0], [3.0, 5.0, 7.0]
    found = effect_of_runs("loss", "loss", 0.5, runs(*a), runs(*b), paired=False)
    assert found.of(WHOLE).chance == pytest.approx(stats.ttest_ind(b, a, equal_var=False).pvalue)


def test_interval_beside_reruns_equals_a_sum_by_hand() -> None:
    """A further run of the same kind lies within t(2) * s * sqrt(1 + 1/3); four steps tell no noise."""
    a, b = ([values[:4] for values in side] for side in (runs(0.50, 0.51, 0.49), runs(0.505)))
    found = effect_of_runs("reward", "reward", 0.2, a, b, paired=False)
    whole = found.of(WHOLE)
    assert whole.interval is not None
    assert whole.interval.high - whole.difference == pytest.approx(4.302653 * 0.01 * np.sqrt(4 / 3), rel=1e-6)
    assert found.verdict == "equivalent" and found.evidence.startswith("3 runs of the reference, one")


def test_how_many_runs_would_decide() -> None:
    draw = np.random.default_rng(0)
    a, b = (runs(*(0.5 + 0.05 * draw.normal(size=4))) for _ in range(2))
    found = effect_of_runs("reward", "reward", 0.04, a, b, paired=False)
    assert found.verdict == "inconclusive" and found.runs_to_decide is not None
    assert 5 < found.runs_to_decide < 500
    wide = effect_of_runs("reward", "reward", 10.0, a, b, paired=False)
    assert wide.verdict == "equivalent" and wide.runs_to_decide is None


def test_one_seed_that_failed_is_not_hidden() -> None:
    good = [0.50, 0.52, 0.48, 0.51, 0.49]
    found = effect_of_runs("s", "score", 0.05, runs(*good), runs(*good[:4], 0.0), paired=False)
    assert found.verdict == "inconclusive"


@pytest.mark.parametrize("steps", [1000, 2000])
def test_long_logs_with_a_learning_curve_are_equivalent(steps: int) -> None:
    """Estimated with the sum of the curves, the learning curve was noise: none was equivalent."""
    draw = np.random.default_rng(0)
    curve = 0.2 + 0.6 * (1 - np.exp(-np.arange(steps) / 60))
    pairs = [curve + 0.03 * draw.normal(size=(2, steps)) for _ in range(5)]
    assert {effect_of_curves("reward", "reward", 0.04, a, b).verdict for a, b in pairs} == {"equivalent"}


def test_the_interval_that_is_shown_decides() -> None:
    draw = np.random.default_rng(0)
    for shift in (0.0, -0.02, -0.04, -0.06, -0.1):
        a, b = LEARNING[:100] + 0.04 * draw.normal(size=(2, 100))
        effect = effect_of_curves("reward", "reward", 0.04, a, b + shift)
        intervals = [one.interval for one in effect.windows if one.interval is not None]
        beyond = any(one.low > 0.04 or one.high < -0.04 for one in intervals)
        within = all(intervals[at].low >= -0.04 and intervals[at].high <= 0.04 for at in (0, -1))
        expected = "different" if beyond else "equivalent" if within else "inconclusive"
        assert effect.verdict == expected


@pytest.mark.parametrize("reruns", [1, 2, 3, 5])
def test_reruns_are_never_less_useful_than_none(reruns: int) -> None:
    """Honest runs of 100 steps, and a candidate 0.08 lower; seeds move a run by 0.005."""
    draw = np.random.default_rng(0)
    useful = {"none": 0, "reruns": 0}
    for _ in range(5):
        runs_KS = [
            LEARNING[:100] + remembering(draw, 100, 0.3, 0.02) + 0.005 * draw.normal()
            for _ in range(reruns + 2)
        ]
        for shift, expected in ((0.0, "equivalent"), (-0.08, "different")):
            *references, candidate_S = runs_KS
            alone = effect_of_curves("reward", "reward", 0.04, references[0], candidate_S + shift)
            more = effect_of_runs("reward", "reward", 0.04, references, [candidate_S + shift], paired=False)
            useful["none"] += alone.verdict == expected
            useful["reruns"] += more.verdict == expected
    # One of ten may cross the margin by chance.
    assert useful["reruns"] >= useful["none"] - 1
