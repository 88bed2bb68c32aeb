"""When a worker is replaced, and when its end is only the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from isotrain.cluster.failures import WorkerDied
from isotrain.cluster.replaceable import Replaceable, WorkerTask


class Group:
    """One worker, which can be started again any number of times."""

    def __init__(self, closed: bool) -> None:
        self.closed, self.restarts = closed, 0

    def __len__(self) -> int:
        return 1

    def restart(self, index: int) -> None:
        self.restarts += 1

    def within(self, timeout: float) -> Group:
        return self

    def call_on(self, index: int, method: Callable[..., object]) -> None: ...


def test_nobody_takes_the_place_of_one_that_ended_with_the_run() -> None:
    told: list[str] = []
    work: Any = None
    for closed in (False, True):
        group: Any = Group(closed)
        workers = Replaceable(group, 60.0, told.append)
        death = WorkerDied("rollout engine 0 died", 0)
        if closed:
            with pytest.raises(WorkerDied):
                workers.replace(WorkerTask(0, 0, work), death)
        else:
            workers.replace(WorkerTask(0, 0, work), death)
        assert group.restarts == (not closed)
    assert told == ["warning: rollout engine 0 died\na new worker replaces it"]
