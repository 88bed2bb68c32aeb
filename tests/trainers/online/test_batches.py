"""Batches made ahead: how many are under way, in which order they come, and what an error does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from isotrain.errors import ClusterError
from isotrain.trainers.online.batches import Ahead, Batch, Make
from isotrain.trainers.online.collector import Seconds


class Maker:
    """Batches that are written and made when the test says so; `begun` and `making` are counts."""

    def __init__(self) -> None:
        self.begun = 0
        self.making = threading.Semaphore(0)
        self.write: list[threading.Event] = []
        self.finish: list[threading.Event] = []

    def begin(self) -> Make:
        self.begun += 1
        number, write, finish = self.begun, threading.Event(), threading.Event()
        self.write.append(write)
        self.finish.append(finish)

        def make(next_may_begin: Callable[[], None]) -> Batch:
            self.making.release()
            if write.wait(10):
                next_may_begin()
            assert finish.wait(10)
            return Batch([], None, number, Seconds(0.0, 0.0), 0)

        return make


@pytest.mark.parametrize("staleness", [1, 3])
def test_as_many_as_may_be_stale_are_begun(staleness: int) -> None:
    maker = Maker()
    ahead = Ahead(maker.begin, staleness, batches=6)
    assert maker.begun == staleness + 1
    for event in maker.write + maker.finish:
        event.set()
    assert [ahead.next().taken, ahead.next().taken] == [1, 2]
    assert maker.begun == staleness + 1, "new weights, and not a batch that is taken, let the next begin"
    for step in range(1, 6):
        ahead.weights_are_out()
        assert maker.begun == min(staleness + 1 + step, 6)


def test_the_next_is_written_while_the_last_answers_are_scored() -> None:
    maker = Maker()
    ahead = Ahead(maker.begin, 1, batches=2)
    assert maker.making.acquire(timeout=10) and not maker.making.acquire(timeout=0.2)
    maker.write[0].set()
    assert maker.making.acquire(timeout=10), "though the first is not made"
    maker.write[1].set()
    maker.finish[1].set()  # made before the first, but not given before it
    maker.finish[0].set()
    assert [ahead.next().taken, ahead.next().taken] == [1, 2]


def test_a_batch_that_never_says_when_it_is_written_is_made_before_the_next() -> None:
    order: list[str] = []

    def begin() -> Make:
        def make(next_may_begin: Callable[[], None]) -> Batch:
            order.append("begun")
            time.sleep(0.1)
            order.append("made")
            return Batch([], None, 0, Seconds(0.0, 0.0), 0)

        return make

    ahead = Ahead(begin, 1, batches=2)
    ahead.next(), ahead.next()
    assert order == ["begun", "made"] * 2


def test_an_error_comes_where_the_batch_is_asked_for() -> None:
    def begin() -> Make:
        def make(next_may_begin: Callable[[], None]) -> Batch:
            raise ClusterError("an engine died for good")

        return make

    ahead = Ahead(begin, 1, batches=5)
    for _ in range(2):  # the second waited for the first
        with pytest.raises(ClusterError, match="died for good"):
            ahead.next()


def test_nothing_is_begun_after_the_end() -> None:
    maker = Maker()
    ahead = Ahead(maker.begin, 1, batches=9)
    ahead.close()
    ahead.weights_are_out()
    assert maker.begun == 2
