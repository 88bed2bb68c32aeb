"""The envelope: honest noise stays inside, small systematic errors do not."""

from __future__ import annotations

import numpy as np
import pytest
from known_curves import falling, noisy, run_of

from isotrain.errors import DataError
from isotrain.tools.parity.levels.envelope import WINDOW, calibrated, distances, envelope_level, rolling

NOISE = 1e-4
REFERENCE = falling()
MEMBERS = [run_of(loss=noisy(REFERENCE, NOISE, seed)) for seed in range(1, 7)]


def level(candidate: np.ndarray) -> object:
    return envelope_level(run_of(loss=REFERENCE), run_of(loss=candidate), MEMBERS)


def test_a_further_member_is_inside() -> None:
    """Of 200 honest runs at most 2 may be taken for mistakes."""
    outside = sum(level(noisy(REFERENCE, NOISE, seed)).state != "same" for seed in range(100, 300))  # type: ignore[attr-defined]
    assert outside <= 2


def test_noise_twice_as_large_is_inside() -> None:
    """Kernels of another device may round worse than changes of the last digit."""
    assert all(level(noisy(REFERENCE, 2 * NOISE, seed)).state == "same" for seed in range(100, 120))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "mistake",
    [
        lambda s: 20 * NOISE * np.ones_like(s),
        lambda s: 30 * NOISE * (s > 40),
        lambda s: 0.01 * (1 - np.exp(-s / 20)),
    ],
    ids=["offset", "from step 40 on", "learning a little faster"],
)
def test_mistakes_that_the_published_rule_accepts_are_outside(mistake: object) -> None:
    error = mistake(np.arange(len(REFERENCE)))  # type: ignore[operator]
    assert np.abs(error).mean() < 0.02  # the published rule
    found = level(noisy(REFERENCE, NOISE, 77) + error)
    assert found.state == "different"  # type: ignore[attr-defined]


def test_a_bias_that_is_small_beside_the_noise_of_a_step_is_outside() -> None:
    """Half a width at every step, over a thousand of them: signs add up, sizes do not."""
    long = falling(steps=1000)
    members = [run_of(loss=noisy(long, NOISE, seed)) for seed in range(1, 7)]
    found = envelope_level(run_of(loss=long), run_of(loss=noisy(long, NOISE, 50) + NOISE / 2), members)
    assert found.state == "different" and "times as far from the reference" in found.words


def test_an_error_is_not_spread_to_steps_before_it() -> None:
    spike = np.zeros(80)
    spike[30] = 1.0
    ratio = rolling(spike)
    assert (ratio[:30] == 0).all() and (ratio[30 : 30 + WINDOW] > 0).all() and not ratio[30 + WINDOW :].any()


def test_members_that_are_equal_in_every_digit_are_no_envelope() -> None:
    same = [run_of(loss=REFERENCE)] * 3
    found = envelope_level(run_of(loss=REFERENCE), run_of(loss=REFERENCE * (1 + 2.4e-7)), same)
    assert found.state == "not run" and "vary the kernel" in found.words


def test_an_envelope_that_is_wider_than_the_margin_cannot_say_same() -> None:
    members = [run_of(loss=noisy(REFERENCE, 0.3, seed)) for seed in range(1, 7)]
    found = envelope_level(run_of(loss=REFERENCE), run_of(loss=noisy(REFERENCE, 0.3, 50)), members)
    assert found.state == "cannot tell" and "would not be seen" in found.words
    narrow = envelope_level(
        run_of(loss=REFERENCE), run_of(loss=noisy(REFERENCE, NOISE, 50)), MEMBERS, {"train/loss": 1e-5}
    )
    assert narrow.state == "cannot tell"


@pytest.mark.parametrize("metrics", [1, 5])
@pytest.mark.parametrize("steps", [60, 1000])
def test_false_alarms_do_not_grow_with_length_or_metrics(steps: int, metrics: int) -> None:
    """Heavy tails (Student's t with 3 degrees), 7 runs: 1 % by design."""
    draw = np.random.default_rng(steps + metrics)
    alarms, tries = 0, 150
    for _ in range(tries):
        found = [_drawn(draw.standard_t(3, (8, steps))) for _ in range(metrics)]
        rated = calibrated(
            np.concatenate([one for one, _ in found]), np.concatenate([own for _, own in found], axis=1)
        )
        alarms += bool(rated.ratio_T.max() > rated.limit)
    assert alarms <= 6  # 1.5 expected; more than 6 happen once in a thousand times


def _drawn(runs_NS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A candidate's statistics, and those of seven honest runs among themselves."""
    own_NS = runs_NS[1:]
    each = [distances(own_NS[n], np.delete(own_NS, n, axis=0)).statistics_T for n in range(len(own_NS))]
    return distances(runs_NS[0], own_NS).statistics_T, np.stack(each)


def test_too_few_members_are_not_an_envelope() -> None:
    assert envelope_level(run_of(loss=REFERENCE), run_of(loss=REFERENCE), MEMBERS[:2]).state == "not run"


def test_metrics_that_only_some_have_are_left_out() -> None:
    candidate = run_of(loss=REFERENCE, grad_norm=REFERENCE + 5)
    assert envelope_level(run_of(loss=REFERENCE), candidate, MEMBERS).state == "same"


def test_the_evidence_of_a_long_run_is_short() -> None:
    long = falling(steps=100_000)
    members = [run_of(loss=noisy(long, NOISE, seed)) for seed in range(3)]
    found = envelope_level(run_of(loss=long), run_of(loss=long), members)
    kept = found.evidence["envelope"]["train/loss"]
    assert 1000 < len(kept["steps"]) == len(kept["low"]) == len(kept["high"]) <= 2000


def test_a_member_that_is_no_number_is_refused() -> None:
    broken = REFERENCE.copy()
    broken[40] = np.nan
    with pytest.raises(DataError, match="is not a number"):
        envelope_level(run_of(loss=REFERENCE), run_of(loss=REFERENCE), [*MEMBERS, run_of(loss=broken)])
