"""Responses ahead of training: how old they are, which draws they response, and what an update may wait
for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from stand_ins import StandInCollector, StandInGroup, stand_in_engines, weights

from isotrain.data.loader import Sampler
from isotrain.errors import WeightUpdateError
from isotrain.rollout.base import Sampling
from isotrain.trainers.build import TRAIN
from isotrain.trainers.online.engines import Engines
from isotrain.trainers.online.rollouts import AsyncBatches, Batch, BatchMaker

ROWS, BATCH, N = 10, 4, 2


def maker(
    collector: StandInCollector,
    taken: int = 0,
    limit: int | None = None,
    attempts: int = 0,
    greedy: bool = False,
    batch_size: int = BATCH,
) -> BatchMaker:
    sampler = Sampler(ROWS, batch_size, seed=7, limit=limit, taken=taken)
    return BatchMaker(collector, sampler, N, Sampling(8), attempts, greedy)  # type: ignore[arg-type]


def trained(
    engines: Engines,
    ahead: AsyncBatches,
    steps: int,
    before: Callable[[], object] = lambda: None,
    learn: Callable[[], object] = lambda: None,
) -> list[Batch]:
    """The batches of the first steps, with what the loop does between them."""
    batches = []
    for step in range(1, steps + 1):
        before()
        batches.append(ahead.next())
        learn()
        engines.settle()
        engines.send(weights(step))
        ahead.weights_published()
    return batches


def ages(batches: list[Batch]) -> list[int]:
    """By how many versions the responses of each step were older than what learnt from them."""
    return [step - batch.groups[0].responses.version for step, batch in enumerate(batches)]


def draws(batches: list[Batch]) -> list[list[tuple[int, int]]]:
    return [[(g.responses.prompt_index, g.responses.row) for g in batch.groups] for batch in batches]


@pytest.mark.heavy
@pytest.mark.parametrize("staleness", [1, 2])
def test_an_update_may_wait_longer_for_responses_than_it_may_take_itself(staleness: int) -> None:
    group = StandInGroup(seconds=0.7)
    engines = stand_in_engines(group, timeout=0.5)
    ahead = AsyncBatches(maker(StandInCollector(engines)).begin, staleness, 4, engines.verifying)
    assert len(trained(engines, ahead, 4)) == 4
    engines.settle()
    assert group.version == 4


def test_the_time_of_an_update_begins_when_the_engine_is_free() -> None:
    engines = stand_in_engines(StandInGroup(seconds=0.7), timeout=0.5)
    respond: Any = StandInGroup.respond
    engines.submit(0, respond, lambda: None)
    engines.send(weights(1))
    assert engines.settle() == 0.0


def test_in_flight_the_time_of_an_update_begins_at_once() -> None:
    """No real engine lets it wait for responses."""
    engines = stand_in_engines(StandInGroup(seconds=0.7), timeout=0.2, in_flight=True)
    respond: Any = StandInGroup.respond
    engines.submit(0, respond, lambda: None)
    engines.send(weights(1))
    with pytest.raises(WeightUpdateError, match=r"weight update 1 did not end within 0\.2 s"):
        engines.settle()


@pytest.mark.parametrize("in_flight", [False, True])
def test_responses_begin_with_the_newest_weights_that_were_sent(in_flight: bool) -> None:
    """In flight, calls of one engine have no order: they say what they wait for."""
    engines = stand_in_engines(StandInGroup(), in_flight=in_flight)
    assert engines.first_version == 0
    engines.send(weights(3))
    assert engines.first_version == (3 if in_flight else 0)
    engines.settle()


def test_an_update_that_hangs_is_told_in_time() -> None:
    group = StandInGroup(seconds=0.3, hangs_at=2)
    engines = stand_in_engines(group, timeout=0.5)
    ahead = AsyncBatches(maker(StandInCollector(engines)).begin, 2, 9, engines.verifying)
    with pytest.raises(WeightUpdateError, match=r"weight update 2 did not end within 0.5 s"):
        # While it learns, the next batch reaches the engine, before the weights that hang.
        trained(engines, ahead, 9, learn=lambda: time.sleep(0.1))
    assert group.begun[-1] == "update_and_check" and group.version == 1  # it still hangs


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_batch_behind_an_update_that_hangs_is_not_waited_for(staleness: int) -> None:
    """The engine gets the next batch after the weights, because training is faster than it writes."""
    group = StandInGroup(seconds=0.1, hangs_at=1)
    engines = stand_in_engines(group, timeout=0.5)
    asked = StandInCollector(engines)
    ahead = AsyncBatches(maker(asked, batch_size=1).begin, staleness, 9, engines.verifying)
    for _ in range(staleness + 1):  # all that were begun before the weights
        batch = ahead.next()
        assert batch.groups[0].responses.version == 0
    engines.send(weights(1))
    ahead.weights_published()
    with pytest.raises(WeightUpdateError, match=r"weight update 1 did not end within 0.5 s .rollout.update"):
        ahead.next()
    # The batch was asked for and not begun: its result would never come.
    assert len(asked.asked) > group.begun.count("generate") and group.begun[-1] == "update_and_check"
    assert 0.5 in group.limits  # the update was given its time


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_fast_responses_are_as_old_as_they_may_be_and_never_older(staleness: int) -> None:
    engines = stand_in_engines(StandInGroup())
    ahead = AsyncBatches(maker(StandInCollector(engines)).begin, staleness, 8, engines.verifying)
    seen = ages(trained(engines, ahead, 8, before=lambda: time.sleep(0.1)))
    assert seen[0] == 0 and max(seen) == staleness


@pytest.mark.parametrize("staleness", [2, 3])
def test_slow_responses_are_written_with_the_newest_weights_there_are(staleness: int) -> None:
    """New weights never wait behind a batch that has not been begun."""
    engines = stand_in_engines(StandInGroup())
    asked = threading.Semaphore(0)
    ahead = AsyncBatches(
        maker(StandInCollector(engines, wait=asked.acquire)).begin, staleness, 8, engines.verifying
    )
    # Each batch takes until training has nothing else to do.
    assert max(ages(trained(engines, ahead, 8, before=asked.release))) == 1


def alike(place: int, sample: int) -> float:
    """Scores that are the same throughout the group of every third draw."""
    return float(sample if place % 3 else 1)


def run(taken: int, steps: int, **options: Any) -> list[Batch]:
    """The first batches of a run that goes on after so many draws, two versions ahead."""
    engines = stand_in_engines(StandInGroup())
    made = maker(StandInCollector(engines, alike), taken, **options)
    return trained(engines, AsyncBatches(made.begin, 2, steps, engines.verifying), steps)


@pytest.mark.parametrize("options", [{}, {"attempts": 3}, {"greedy": True}, {"attempts": 1, "greedy": True}])
def test_draws_are_in_order_and_a_resumed_run_goes_on_with_those_that_are_left(
    options: dict[str, Any],
) -> None:
    whole = run(0, 7, **options)
    sampler = Sampler(ROWS, 1, seed=7)
    order = [int(sampler.next_batch()[0]) for _ in range(whole[-1].taken)]
    learnt = [draw for batch in draws(whole) for draw in batch]
    assert [place for place, _ in learnt] == sorted({place for place, _ in learnt}), "each once, in order"
    assert all(order[place] == row for place, row in learnt)
    if options.get("attempts") == 3:
        assert all(place % 3 for place, _ in learnt) and max(batch.resampled for batch in whole) > 0
    elif not options.get("attempts"):
        assert [place for place, _ in learnt] == list(range(7 * BATCH))
    if options.get("greedy"):
        assert all(set(b.greedy or {}) == {g.responses.prompt_index for g in b.groups} for b in whole)
    for done in (1, 4):
        assert draws(run(whole[done - 1].taken, 7 - done, **options)) == draws(whole)[done:]


def test_epochs_end_with_a_short_batch() -> None:
    steps = -(-2 * ROWS // 8)
    whole = run(0, steps, limit=2 * ROWS, batch_size=8)
    assert [len(batch.groups) for batch in whole] == [8, 8, 4]
    assert Counter(row for batch in draws(whole) for _, row in batch) == dict.fromkeys(range(ROWS), 2)
    for done in (1, 2):
        left = run(whole[done - 1].taken, steps - done, limit=2 * ROWS, batch_size=8)
        assert draws(left) == draws(whole)[done:]


def test_one_by_one_asks_for_one_batch_after_the_other() -> None:
    """Whether a draw is replaced is known when its responses are scored."""
    engines = stand_in_engines(StandInGroup())
    collector = StandInCollector(engines, alike)
    trained(engines, AsyncBatches(maker(collector, attempts=5).begin, 3, 5, engines.verifying), 5)
    places = [place for _, asked, _, _ in collector.asked for place in asked]
    assert places == list(range(len(places)))


def test_lost_groups_are_generated_again() -> None:
    collector = StandInCollector(stand_in_engines(StandInGroup()))
    made = maker(collector, greedy=True)
    batch = made.begin()(lambda: None)
    lost = batch.groups[1], batch.groups[3]
    groups = made.again(batch.groups, {group.handle for group in lost})
    # As they were drawn and sampled, not greedily, whichever was asked for last.
    assert collector.asked[-1] == (TRAIN, [1, 3], N, 1.0)
    assert draws([replace(batch, groups=groups)]) == draws([batch])
    changed = [new is not old for new, old in zip(groups, batch.groups, strict=True)]
    assert changed == [False, True, False, True]
    assert {group.handle for group in lost}.isdisjoint(group.handle for group in groups)
