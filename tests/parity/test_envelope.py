"""The envelope: honest noise stays inside, small systematic errors do not."""

from __future__ import annotations

import numpy as np
import pytest
from known_curves import falling, noisy, run_of

from isotrain.errors import DataError
from isotrain.parity.envelope import LIMIT, WINDOW, envelope, envelope_level

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


def test_the_step_of_leaving_is_told() -> None:
    error = 0.1 * (np.arange(len(REFERENCE)) >= 39)
    found = level(REFERENCE + error)
    assert "train/loss leaves the envelope of harmless rounding at step 40" in found.words  # type: ignore[attr-defined]


def test_an_error_is_not_seen_before_it_happens() -> None:
    around = envelope(np.arange(1, 81), REFERENCE, [m.metrics["train/loss"].values_S for m in MEMBERS])
    spike = REFERENCE.copy()
    spike[30] += 1
    ratio = around.ratio(spike)
    assert (
        (ratio[:30] == 0).all()
        and (ratio[30 : 30 + WINDOW] > LIMIT).all()
        and (ratio[30 + WINDOW :] == 0).all()
    )


def test_equal_members_leave_room_for_the_last_digit() -> None:
    same = [run_of(loss=REFERENCE)] * 3
    close = envelope_level(run_of(loss=REFERENCE), run_of(loss=REFERENCE * (1 + 2.4e-7)), same)
    assert close.state == "same"
    assert (
        envelope_level(run_of(loss=REFERENCE), run_of(loss=REFERENCE * (1 + 1e-4)), same).state == "different"
    )


def test_too_few_members_are_not_an_envelope() -> None:
    assert envelope_level(run_of(loss=REFERENCE), run_of(loss=REFERENCE), MEMBERS[:2]).state == "not run"


def test_metrics_that_only_some_have_are_left_out() -> None:
    candidate = run_of(loss=REFERENCE, grad_norm=REFERENCE + 5)
    assert envelope_level(run_of(loss=REFERENCE), candidate, MEMBERS).state == "same"


def test_noise_that_members_only_have_after_some_steps_is_allowed_from_the_first() -> None:
    members = [run_of(loss=noisy(REFERENCE, NOISE, seed)) for seed in range(1, 7)]
    for member in members:
        member.metrics["train/loss"].values_S[0] = REFERENCE[0]
    candidate = REFERENCE.copy()
    candidate[0] += NOISE
    assert envelope_level(run_of(loss=REFERENCE), run_of(loss=candidate), members).state == "same"
    candidate[0] += 10 * NOISE
    assert envelope_level(run_of(loss=REFERENCE), run_of(loss=candidate), members).state == "different"


def test_the_evidence_of_a_long_run_is_short() -> None:
    long = falling(steps=100_000)
    members = [run_of(loss=noisy(long, NOISE, seed)) for seed in range(3)]
    found = envelope_level(run_of(loss=long), run_of(loss=long), members)
    kept = found.evidence["envelope"]["train/loss"]
    assert 1000 < len(kept["steps"]) == len(kept["low"]) == len(kept["high"]) <= 2000


def test_what_is_no_number() -> None:
    """Of the candidate it is as far away as can be, at its own step; of a member it is refused."""
    broken = REFERENCE.copy()
    broken[40] = np.nan
    found = envelope_level(run_of(loss=REFERENCE), run_of(loss=broken), MEMBERS)
    assert found.state == "different" and "at step 41" in found.words
    with pytest.raises(DataError, match="is not a number"):
        envelope_level(run_of(loss=REFERENCE), run_of(loss=REFERENCE), [*MEMBERS, run_of(loss=broken)])
