"""What is counted of answers without a score, and when it is told."""

from __future__ import annotations

from isotrain.trainers.online.messages import Group, Responses, Score
from isotrain.trainers.online.metrics import Failures, Warnings, failures_of, recorded_failures

ANSWERS = Responses(0, 0, 3, (1, 1, 1), (1, 1, 1), (True,) * 3, 0, 0.0)


def failing(share: float) -> Failures:
    return Failures(100, {"error": round(100 * share)}, "error: no judge")


def test_counted_by_cause() -> None:
    scores = (Score(1.0, {}, None, ""), Score(0.0, {}, "crash", "it ended"), Score(0.0, {}, "error", "no"))
    found = failures_of([Group(ANSWERS, 0, scores, "data")])
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
