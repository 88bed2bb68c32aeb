"""Batches made ahead: how many are under way, in which order they come, and what an error does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from isotrain.errors import ClusterError
from isotrain.trainers.online.batches import Ahead, Batch
from isotrain.trainers.online.collector import Seconds


class Maker:
    """Batches that are made when the test says so; `begun` and `making` are counts."""

    def __init__(self) -> None:
        self.begun = 0
        self.making = threading.Semaphore(0)
        self.finish: list[threading.Event] = []

    def begin(self) -> Callable[[], Batch]:
        self.begun += 1
        number, event = self.begun, threading.Event()
        self.finish.append(event)

        def make() -> Batch:
            self.making.release()
            assert event.wait(10)
            return Batch([], None, number, Seconds(0.0, 0.0), 0)

        return make


@pytest.mark.parametrize("staleness", [1, 3])
def test_as_many_as_may_be_stale_are_under_way(staleness: int) -> None:
    maker = Maker()
    ahead = Ahead(maker.begin, staleness, batches=6)
    assert maker.begun == staleness + 1
    for _ in range(staleness + 1):
        assert maker.making.acquire(timeout=10), "all at the same time"
    maker.finish[1].set()  # made before the first, but not given before it
    maker.finish[0].set()
    assert [ahead.next().taken, ahead.next().taken] == [1, 2]
    assert maker.begun == staleness + 1, "new weights, and not a batch that is taken, let the next begin"
    for step in range(1, 6):
        ahead.weights_are_out()
        assert maker.begun == min(staleness + 1 + step, 6)


def test_one_by_one() -> None:
    maker = Maker()
    ahead = Ahead(maker.begin, 1, batches=2, one_by_one=True)
    assert maker.making.acquire(timeout=10) and not maker.making.acquire(timeout=0.2)
    maker.finish[0].set()
    assert maker.making.acquire(timeout=10)
    maker.finish[1].set()
    assert [ahead.next().taken, ahead.next().taken] == [1, 2]


def test_an_error_comes_where_the_batch_is_asked_for() -> None:
    def begin() -> Callable[[], Batch]:
        def make() -> Batch:
            raise ClusterError("an engine died for good")

        return make

    ahead = Ahead(begin, 1, batches=5, one_by_one=True)
    for _ in range(2):  # the second waited for the first
        with pytest.raises(ClusterError, match="died for good"):
            ahead.next()


def test_nothing_is_begun_after_the_end() -> None:
    maker = Maker()
    ahead = Ahead(maker.begin, 1, batches=9)
    ahead.close()
    ahead.weights_are_out()
    assert maker.begun == 2
