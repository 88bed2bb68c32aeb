"""Curves alone: three responses, and which one when."""

from __future__ import annotations

import numpy as np
import pytest
from known_curves import falling, noisy, run_of

from isotrain.parity.compare import compare
from isotrain.parity.envelope import envelope_level
from isotrain.parity.levels import Level
from isotrain.parity.paired import paired_level, tempered

REFERENCE = falling()


def level(candidate: np.ndarray) -> Level:
    return paired_level(compare(run_of(loss=REFERENCE), run_of(loss=candidate)))


def test_rounding_in_float32_is_the_same() -> None:
    found = level(noisy(REFERENCE, 1e-6, 1))
    assert found.state == "same" and "the curves agree" in found.words


def test_between_the_two_curves_alone_cannot_tell() -> None:
    found = level(noisy(REFERENCE, 3e-3, 1))
    assert found.state == "cannot tell" and "an envelope would decide" in found.words


def test_other_data_is_different_though_the_published_rule_accepts_it() -> None:
    draw = np.random.default_rng(5)
    smooth = 1.5 - 0.001 * np.arange(80)  # as most of a run is
    reference, other = (smooth + 0.01 * draw.normal(size=80) for _ in range(2))
    comparison = compare(run_of(loss=reference), run_of(loss=other))
    assert not comparison.broken
    found = paired_level(comparison)
    assert found.state == "different" and found.causes == ("other data, or another order of it",)


def test_a_broken_published_rule_is_different() -> None:
    found = level(REFERENCE + 0.03)
    assert found.state == "different" and "from the first step" in found.causes[0]


def test_where_they_part_is_told() -> None:
    found = level(REFERENCE + 0.8 * (np.arange(80) >= 24))
    assert found.state == "different" and "part at step 25" in found.words


@pytest.mark.parametrize(("offset", "state"), [(0.0, "same"), (1e-3, "cannot tell")])
def test_flat_curves(offset: float, state: str) -> None:
    flat = np.full(20, 2.0)
    assert paired_level(compare(run_of(loss=flat), run_of(loss=flat + offset))).state == state


def test_a_training_that_rounding_alone_pulls_apart() -> None:
    """Where the reference's own members part as well, the envelope decides."""
    apart = [REFERENCE + 0.8 * sign * (np.arange(80) >= 24) for sign in (1, -1, 0.5)]
    members = [run_of(loss=curve) for curve in apart]
    candidate = REFERENCE + 0.9 * (np.arange(80) >= 24)
    envelope = envelope_level(run_of(loss=REFERENCE), run_of(loss=candidate), members)
    found = tempered(level(candidate), envelope)
    assert envelope.state == "same" and found.state == "cannot tell"
    assert "as runs of the reference do among themselves" in found.words
    calm = [run_of(loss=noisy(REFERENCE, 1e-6, seed)) for seed in range(3)]
    outside = envelope_level(run_of(loss=REFERENCE), run_of(loss=candidate), calm)
    assert tempered(level(candidate), outside).state == "different"


def test_curves_that_the_envelope_did_not_look_at_keep_their_word() -> None:
    envelope = envelope_level(
        run_of(x_loss=REFERENCE), run_of(x_loss=REFERENCE), [run_of(x_loss=REFERENCE)] * 3
    )
    assert envelope.state == "same"
    assert tempered(level(REFERENCE + 0.5), envelope).state == "different"
