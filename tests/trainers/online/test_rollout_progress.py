"""What people see while engines write: the newest request, and engines that have gone silent."""

from __future__ import annotations

from isotrain.trainers.online.rollouts import PATIENCE_SECONDS, RolloutProgress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watch() -> tuple[RolloutProgress, Clock, list[str], list[str]]:
    shown, told, clock = list[str](), list[str](), Clock()
    return RolloutProgress(shown.append, told.append, clock), clock, shown, told


def test_the_newest_of_requests_that_overlap_is_shown() -> None:
    watching, clock, shown, _ = watch()
    with watching.request("responses", 8) as first:
        first.generated, first.scored, clock.now = 8, 2, 40.0
        watching.look(first, [])
        with watching.request("validation responses", 4) as second:
            clock.now = 41.0
            watching.look(first, [])
            watching.look(second, [])
        watching.look(first, [])
    assert shown == [
        "responses 8 of 8, 2 scored, 40 s",
        "validation responses 0 of 4, 0 scored, 1 s",
        "responses 8 of 8, 2 scored, 41 s",
        "",
    ]


def test_an_engine_that_goes_silent_is_named_once() -> None:
    watching, clock, _, told = watch()
    with watching.request("responses", 8) as request:
        for engine in range(2):
            watching.asked(engine)
        for _ in range(3 * int(PATIENCE_SECONDS)):
            clock.now += 1
            watching.heard_from(0)
            watching.look(request, [0, 1])
    assert told == [
        "warning: rollout engine 1 has finished no response for 300 s: "
        "its responses are very long, or it hangs"
    ]


def test_an_engine_that_was_only_slow_is_given_more_time() -> None:
    watching, clock, _, told = watch()
    with watching.request("responses", 8) as request:
        for wait in (PATIENCE_SECONDS + 60, PATIENCE_SECONDS + 120, 2 * PATIENCE_SECONDS + 200):
            watching.asked(0)
            clock.now += wait
            watching.look(request, [0])
            watching.heard_from(0)
    assert [text.split(" for ")[1][:5] for text in told] == ["360 s", "800 s"]
