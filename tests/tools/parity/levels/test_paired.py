"""Curves alone: three responses, and which one when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from known_curves import falling, noisy, run_of

from isotrain.tools.parity.compare.comparison import compare
from isotrain.tools.parity.compare.outcome import outcome_of
from isotrain.tools.parity.levels.level import Level
from isotrain.tools.parity.levels.paired import paired_level
from isotrain.tools.parity.run import RunLog, Series
from isotrain.tools.parity.verdict import judge

REFERENCE = falling()


def level(candidate: np.ndarray) -> Level:
    return paired_level(compare(run_of(loss=REFERENCE), run_of(loss=candidate)))


def test_rounding_in_float32_is_the_same() -> None:
    found = level(noisy(REFERENCE, 1e-6, 1))
    assert found.state == "same" and "the curves agree" in found.words


def test_between_the_two_curves_alone_cannot_tell() -> None:
    found = level(noisy(REFERENCE, 3e-3, 1))
    assert found.state == "cannot tell" and "small mistakes can be as close" in found.words


def test_other_data_is_different_though_the_published_rule_accepts_it() -> None:
    draw = np.random.default_rng(5)
    smooth = 1.5 - 0.001 * np.arange(80)  # as most of a run is
    reference, other = (smooth + 0.01 * draw.normal(size=80) for _ in range(2))
    comparison = compare(run_of(loss=reference), run_of(loss=other))
    assert not comparison.broken
    found = paired_level(comparison)
    assert found.state == "different" and found.causes == ("other data, or another order of it",)


def test_a_constant_offset_is_in_the_loss_itself() -> None:
    found = level(noisy(REFERENCE, 5e-4, 1) + 0.03)
    assert found.state == "different" and "from the first step" in found.causes[0]
    assert "higher throughout the" in found.words


@pytest.mark.parametrize(
    "mistake", [lambda s: 0.02 * s / 80, lambda s: 0.009 * REFERENCE], ids=["drift to 0.02", "0.9 % higher"]
)
def test_a_lasting_sign_is_found_where_the_published_rule_accepts(mistake: object) -> None:
    error = mistake(np.arange(80))  # type: ignore[operator]
    assert np.abs(error).mean() < 0.02
    missed = sum(level(noisy(REFERENCE, 5e-4, seed) + error).state != "different" for seed in range(50))
    assert missed == 0


@pytest.mark.heavy
def test_noise_without_a_sign_is_not_called_different() -> None:
    accused = [seed for seed in range(200) if level(noisy(REFERENCE, 5e-4, seed)).state == "different"]
    assert len(accused) <= 2


def test_honest_noise_on_a_curve_that_hardly_changes_is_left_open() -> None:
    """Then rounding is a large part of its changes."""
    draw = np.random.default_rng(0)
    calm = 1.5 + 0.001 * draw.normal(size=200)
    honest = calm + 5e-4 * draw.normal(size=200)
    found = compare(run_of(loss=calm), run_of(loss=honest))
    assert (found.curves["train/loss"].change_correlation or 1) < 0.95
    assert paired_level(found).state == "cannot tell"


def test_a_sign_below_what_rounding_can_have_is_left_open() -> None:
    found = level(noisy(REFERENCE, 1e-5, 1) + 2e-4)
    assert found.state == "cannot tell"


def test_where_they_part_is_told() -> None:
    swinging = np.where(np.arange(80) % 2, 0.07, -0.07) * (np.arange(80) >= 24)
    found = level(REFERENCE + swinging)
    assert found.state == "different" and "part at step 25" in found.words


@pytest.mark.parametrize(("offset", "state"), [(0.0, "same"), (1e-3, "cannot tell"), (0.1, "different")])
def test_compares_flat_curves(offset: float, state: str) -> None:
    flat = np.full(20, 2.0)
    assert paired_level(compare(run_of(loss=flat), run_of(loss=flat + offset))).state == state


def test_cannot_tell_where_rounding_alone_pulls_runs_apart() -> None:
    """Where runs of the reference swing apart among themselves, the candidate may."""
    swings = np.where(np.arange(80) % 2, 0.8, -0.8) * (np.arange(80) >= 24)
    members = [run_of(loss=REFERENCE + sign * swings) for sign in (1, -1, 0.5)]
    comparison = compare(run_of(loss=REFERENCE), run_of(loss=REFERENCE + 0.9 * swings))
    assert paired_level(comparison).state == "different"
    assert paired_level(comparison, members).state == "cannot tell"
    calm = [run_of(loss=noisy(REFERENCE, 1e-6, seed)) for seed in range(3)]
    assert paired_level(comparison, calm).state == "different"


def replayed(**candidate: np.ndarray) -> tuple[Level, str]:
    """The level of a run with the rewards and the policy loss of the responses, and its pair's question."""
    curves = {
        "critic/score/mean": 1 - REFERENCE / 5,
        "actor/pg_loss": 0.01 * falling(seed=1),
        "actor/grad_norm": falling(seed=2),
        "actor/entropy": falling(seed=3),
    }
    names = {name.rpartition("/")[2]: name for name in curves}
    changed = curves | {names[name]: values for name, values in candidate.items()}
    runs = [
        RunLog(
            Path(name),
            "test",
            {metric: Series(np.arange(1, 81), values) for metric, values in metrics.items()},
            recipe={"rollout": {"replay": replay}},
        )
        for name, metrics, replay in (("a", curves, None), ("b", changed, "a"))
    ]
    comparison = compare(*runs, allow=["recipe"])
    found = paired_level(comparison)
    return found, judge(comparison, outcome_of(comparison, "paired"), [found]).question


def test_rewards_of_replayed_responses_say_nothing_of_the_computation() -> None:
    """What each step computes does: 30 % more gradient, with rewards and losses that are equal."""
    gradient, entropy = falling(seed=2), falling(seed=3)
    same, question = replayed(grad_norm=noisy(gradient, 1e-6, 2), entropy=noisy(entropy, 1e-6, 1))
    assert same.state == "same" and question == "computation"
    larger, _ = replayed(grad_norm=1.3 * gradient)
    assert larger.state == "different" and larger.words == "actor/grad_norm is +30 % at the first step"
    rounded, _ = replayed(grad_norm=1.005 * gradient)
    assert rounded.state == "cannot tell", "narrow types may round with a sign"


def test_replayed_runs_without_what_a_step_computes_cannot_be_told() -> None:
    metrics = {"critic/score/mean": Series(np.arange(1, 81), 1 - REFERENCE / 5)}
    bare = [RunLog(Path(name), "test", metrics) for name in "ab"]
    assert paired_level(compare(*bare)).state == "cannot tell"
