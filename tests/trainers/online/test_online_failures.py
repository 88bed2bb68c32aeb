"""Counts and warnings of responses without a score, and of scores that never differ."""

from __future__ import annotations

import numpy as np
import pytest

from isotrain.trainers.online.messages import Group, Responses, Score
from isotrain.trainers.online.metrics import (
    EqualScores,
    Failures,
    Numbers,
    Warnings,
    failures_of,
    recorded_failures,
)

RESPONSES = Responses(0, 0, 3, (1, 1, 1), (1, 1, 1), (True,) * 3, 0, 0.0)


def failing(share: float) -> Failures:
    return Failures(100, {"error": round(100 * share)}, "error: no judge")


def test_counts_failures_by_cause() -> None:
    scores = (Score(1.0, {}, None, ""), Score(0.0, {}, "crash", "it ended"), Score(0.0, {}, "error", "no"))
    found = failures_of([Group(RESPONSES, 0, scores, "data")])
    assert found == Failures(3, {"crash": 1, "error": 1}, "crash: it ended")
    both = found.plus(Failures(2, {"crash": 2}, "crash: another"))
    assert str(both) == "4 of 5 responses got no score; the first because of crash: it ended"
    assert both.metrics() == {
        "reward/failures": 4.0,
        "reward/timeouts": 0.0,
        "reward/crashes": 3.0,
        "reward/errors": 1.0,
    }
    again = recorded_failures(both.as_counts())
    assert (again.responses, again.causes) == (both.responses, both.causes)
    assert recorded_failures({}) == Failures() and Failures().as_counts() == {}


def test_the_first_few_are_told() -> None:
    warnings = Warnings()
    assert [step for step in range(1, 99) if warnings.is_due(step, failing(0.02))] == [1, 2, 3]
    assert not Warnings().is_due(1, Failures(8))


def test_what_is_twice_as_bad_is_told_again() -> None:
    warnings = Warnings()
    shares = {**dict.fromkeys(range(1, 100), 0.02), **dict.fromkeys(range(50, 60), 0.3), 80: 0.5, 90: 0.7}
    told = [step for step, share in shares.items() if warnings.is_due(step, failing(share))]
    assert told == [1, 2, 3, 50, 90]


def test_a_reward_that_is_dead_is_told_every_ten_steps() -> None:
    warnings = Warnings()
    told = [step for step in range(1, 60) if warnings.is_due(step, failing(1.0 if step > 20 else 0.0))]
    assert told == [21, 22, 23, 33, 43, 53]


GROUPS = [Group(RESPONSES, 0, (Score(0.0, {}, None, ""),) * 3, "data")] * 2


def scores(*values: float) -> Numbers:
    return np.array(values)


@pytest.mark.parametrize(
    ("step", "within", "over_all"),
    [
        (scores(0, 0, 0, 0, 0, 0), True, True),
        # One prompt always right, the other never: groups learn nothing, a baseline of the batch does.
        (scores(1, 1, 1, 0, 0, 0), True, False),
        (scores(0, 0, 0, 0, 1, 0), False, False),
    ],
)
def test_equal_scores_are_reported_after_three_steps(step: Numbers, within: bool, over_all: bool) -> None:
    for compares_within_groups, is_reported in ((True, within), (False, over_all)):
        watch = EqualScores()
        problems = [
            watch.problem(GROUPS, step, compares_within_groups=compares_within_groups) for _ in range(9)
        ]
        assert [i for i, problem in enumerate(problems) if problem] == ([2] if is_reported else [])


def test_scores_that_differed_once_may_become_equal() -> None:
    """A task that is solved scores 1 from then on."""
    watch = EqualScores()
    steps = [scores(0, 0, 0, 0, 0, 0), scores(0, 0, 1, 0, 0, 0), *[scores(1, 1, 1, 1, 1, 1)] * 9]
    assert not any(watch.problem(GROUPS, step, compares_within_groups=True) for step in steps)
