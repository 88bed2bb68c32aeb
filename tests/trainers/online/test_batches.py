"""Batches: how many are made ahead, in which order they come, what an error does, what failed in them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from isotrain.data.loader import Sampler
from isotrain.errors import ClusterError
from isotrain.rollout.base import Sampling
from isotrain.trainers.online.messages import Group, PromptRequest, Responses, Score
from isotrain.trainers.online.metrics import Failures
from isotrain.trainers.online.rollouts import AsyncBatches, Batch, BatchMaker, Make, Seconds


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
    ahead = AsyncBatches(maker.begin, staleness, batches=6)
    assert maker.begun == staleness + 1
    for event in maker.write + maker.finish:
        event.set()
    assert [ahead.next().taken, ahead.next().taken] == [1, 2]
    assert maker.begun == staleness + 1, "new weights, and not a batch that is taken, let the next begin"
    for step in range(1, 6):
        ahead.weights_published()
        assert maker.begun == min(staleness + 1 + step, 6)


def test_the_next_is_written_while_the_last_responses_are_scored() -> None:
    maker = Maker()
    ahead = AsyncBatches(maker.begin, 1, batches=2)
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

    ahead = AsyncBatches(begin, 1, batches=2)
    ahead.next(), ahead.next()
    assert order == ["begun", "made"] * 2


def test_an_error_comes_where_the_batch_is_asked_for() -> None:
    def begin() -> Make:
        def make(next_may_begin: Callable[[], None]) -> Batch:
            raise ClusterError("an engine died for good")

        return make

    ahead = AsyncBatches(begin, 1, batches=5)
    for _ in range(2):  # the second waited for the first
        with pytest.raises(ClusterError, match="died for good"):
            ahead.next()


def test_nothing_is_begun_after_the_end() -> None:
    maker = Maker()
    ahead = AsyncBatches(maker.begin, 1, batches=9)
    ahead.close()
    ahead.weights_published()
    assert maker.begun == 2


N = 2


class Scripted:
    """In the place of engines and reward workers: the scores of each draw, those of a greedy response
    apart."""

    def __init__(self, sampled: dict[int, Sequence[Score]], greedy: dict[int, Score]) -> None:
        self.sampled, self.greedy = sampled, greedy

    def collect(
        self, store: str, prompt_requests: Sequence[PromptRequest], n: int, sampling: Sampling, *_: Any
    ) -> tuple[list[Group], Seconds]:
        groups = []
        for prompt_index, row in prompt_requests:
            scores = (
                tuple(self.sampled[prompt_index]) if sampling.temperature else (self.greedy[prompt_index],)
            )
            assert len(scores) == n
            responses = Responses(prompt_index, row, 3, (1,) * n, (1,) * n, (True,) * n, 0, 0.0)
            groups.append(Group(responses, prompt_index, scores, "data"))
        return groups, Seconds(0.0, 0.0)


def good(*values: float) -> list[Score]:
    return [Score(value, {}, None, "") for value in values]


DEAD = Score(0.0, {}, "error", "no judge there")
SLOW = Score(0.0, {}, "timeout", "no result")


def made(collector: Any, attempts: int = 0, greedy: bool = False) -> Batch:
    maker = BatchMaker(collector, Sampler(9, 2, seed=0), N, Sampling(4), attempts, greedy)
    return maker.begin()(lambda: None)


def test_failures_of_replaced_draws_are_counted() -> None:
    """Equal scores because of a dead judge are no reason to think that the prompts are too easy."""
    scores = {0: [SLOW, DEAD], 1: good(0, 1), 2: [DEAD, DEAD], 3: good(1, 0)}
    batch = made(Scripted(scores, {}), attempts=3)
    assert [g.responses.prompt_index for g in batch.groups] == [1, 3] and batch.resampled == 2
    assert batch.others == Failures(4, {"timeout": 1, "error": 3}, "timeout: no result")


def test_what_the_last_attempt_gave_is_not_counted_twice() -> None:
    scores = {0: [DEAD, DEAD], 1: good(0, 1), 2: [DEAD, DEAD]}
    batch = made(Scripted(scores, {}), attempts=1)
    assert [g.responses.prompt_index for g in batch.groups] == [1, 2]
    assert batch.others == Failures(2, {"error": 2}, "error: no judge there")


def test_a_greedy_response_that_failed_is_no_baseline() -> None:
    collector = Scripted({0: good(0, 1), 1: good(0, 1)}, {0: good(0.5)[0], 1: SLOW})
    batch = made(collector, greedy=True)
    assert batch.greedy is not None and batch.greedy[0] == 0.5 and math.isnan(batch.greedy[1])
    assert batch.others == Failures(2, {"timeout": 1}, "timeout: no result")
