"""Which steps are saved: by number, or by the clock, which bounds what is lost and what saving costs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from isotrain.observe.console import Console
from isotrain.observe.run_directory import RunDirectory
from isotrain.trainers.job import LARGEST_SHARE, MINUTES, Job, Recorder, SaveSchedule


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def saved(every: int | None, steps: int, step_seconds: float, save_seconds: float = 0.0) -> list[int]:
    clock = Clock()
    schedule, found = SaveSchedule(every, steps, clock), []
    for step in range(1, steps + 1):
        clock.now += step_seconds
        if schedule.is_due(step):
            clock.now += save_seconds
            schedule.saved(save_seconds)
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("every", "expected"), [(3, [3, 6, 7]), (0, [7]), (9, [7]), (1, [1, 2, 3, 4, 5, 6, 7])]
)
def test_saves_by_number_of_steps(every: int, expected: list[int]) -> None:
    assert saved(every, 7, step_seconds=3600) == expected


@pytest.mark.parametrize("step_seconds", [1.0, 47.0, 599.0, 600.0, 4000.0])
def test_by_the_clock_a_run_loses_minutes_and_the_step_that_it_is_in(step_seconds: float) -> None:
    steps = saved(None, 3000, step_seconds)
    assert steps[-1] == 3000
    gaps = [b - a for a, b in zip([0, *steps[:-1]], steps, strict=True)]
    assert max(gaps) * step_seconds < 60 * MINUTES + step_seconds
    assert all(gap * step_seconds >= 60 * MINUTES for gap in gaps[:-1]), "and saves no more often than that"


def test_a_save_that_takes_long_is_rare() -> None:
    steps = saved(None, 2000, step_seconds=10.0, save_seconds=120.0)
    pauses = [10.0 * (b - a) for a, b in pairwise(steps[:-1])]
    assert pauses and 120.0 / min(pauses) <= LARGEST_SHARE


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("leader_says", [True, False])
def test_one_rank_decides_for_all(leads: bool, leader_says: bool) -> None:
    """The other clock says the opposite."""

    class World:
        size = 2

        def __init__(self) -> None:
            self.is_main = leads

        def sum(self, numbers: list[float]) -> list[float]:
            others = 0.0 if self.is_main else float(leader_says)
            return [float(numbers[0]) + others, float(numbers[1])]

    clock = Clock()
    world: Any = World()
    job = Job(RunDirectory("run"), Recorder(Console()), 100, 100, SaveSchedule(None, 100, clock), world=world)
    clock.now = 1e6 if leader_says == leads else 0.0
    assert job._agree(5) == (leader_says, False)
