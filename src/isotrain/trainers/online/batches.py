"""Scored batches for training: made on demand, or ahead with bounded staleness."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from isotrain.algorithms.dapo import informative
from isotrain.data.sampler import Sampler
from isotrain.rollout.base import Sampling
from isotrain.trainers.online.background import in_background
from isotrain.trainers.online.collector import Collector, Seconds
from isotrain.trainers.online.messages import Group, PromptRequest, TrajectoriesHandle
from isotrain.trainers.online.metrics import Failures, failures_of
from isotrain.trainers.setup import TRAIN


@dataclass(frozen=True)
class Batch:
    groups: list[Group]
    greedy: dict[int, float] | None
    """Score of the greedy response to each draw, if the algorithm needs it; NaN where scoring failed."""
    taken: int
    """Prompts drawn up to and with this batch."""
    seconds: Seconds
    resampled: int
    """Groups with equal rewards that were replaced."""
    others: Failures = field(default_factory=Failures)
    """Of responses that are not among the groups: of those that were replaced, and greedy ones."""


Make = Callable[[Callable[[], None]], Batch]
"""Makes a batch; what it is given is called once engines may be asked to write the next."""


class Maker(Protocol):
    def begin(self) -> Make:
        """Decide what the next batch is; calling the result makes it."""
        ...

    def again(self, groups: list[Group], gone: Collection[TrajectoriesHandle]) -> list[Group]:
        """The groups of a batch, with new ones for those whose trajectories are gone."""
        ...


class BatchMaker:
    """Draws prompts and has responses generated to them; everything about a batch but when it is made."""

    def __init__(
        self, collector: Collector, sampler: Sampler, n: int, sampling: Sampling, attempts: int, greedy: bool
    ) -> None:
        self.collector = collector
        self.sampler = sampler
        self.n = n
        self.sampling = sampling
        self.attempts = attempts
        self.greedy = greedy

    def begin(self) -> Make:
        """Draw the prompts of a batch; calling the result has responses generated to them."""
        if self.attempts:  # how many it draws is known at its end
            return lambda next_may_begin: self._make(self._draw(self.sampler.batch_size), next_may_begin)
        return partial(self._make, self._draw(self.sampler.batch_size))

    @property
    def one_by_one(self) -> bool:
        """Whether a batch must be made before the next: to know its prompts, or for its greedy responses."""
        return self.attempts > 0 or self.greedy

    def _make(self, prompt_requests: list[PromptRequest], next_may_begin: Callable[[], None]) -> Batch:
        wanted = len(prompt_requests)
        free = (lambda: None) if self.one_by_one else next_may_begin
        groups, seconds = self.collector.collect(TRAIN, prompt_requests, self.n, self.sampling, free)
        resampled, others = 0, Failures()
        for _ in range(self.attempts):
            kept, dropped = _informative(groups)
            missing = wanted - len(kept)
            if not missing:
                break
            # A reward that fails gives equal scores: it must not pass for prompts that are too easy.
            others = others.plus(failures_of(dropped))
            prompt_requests = self._draw(missing)
            more, extra = self.collector.collect(TRAIN, prompt_requests, self.n, self.sampling)
            groups, seconds, resampled = kept + more, seconds.plus(extra), resampled + missing
        taken = prompt_requests[-1].prompt_index + 1
        return self._with_greedy(Batch(groups, None, taken, seconds, resampled, others))

    def _with_greedy(self, batch: Batch) -> Batch:
        if not self.greedy:
            return batch
        places = [PromptRequest(g.responses.prompt_index, g.responses.row) for g in batch.groups]
        best, extra = self.collector.collect(TRAIN, places, 1, _greedy(self.sampling))
        scores = {g.responses.prompt_index: math.nan if (s := g.scores[0]).failure else s.value for g in best}
        others = batch.others.plus(failures_of(best))
        return replace(batch, greedy=scores, seconds=batch.seconds.plus(extra), others=others)

    def again(self, groups: list[Group], gone: Collection[TrajectoriesHandle]) -> list[Group]:
        return self.collector.again(TRAIN, groups, gone, self.n, self.sampling)

    def _draw(self, count: int) -> list[PromptRequest]:
        first = self.sampler.taken
        draw = replace(self.sampler, batch_size=count)
        rows = draw.next_batch()
        self.sampler.taken = draw.taken
        return [PromptRequest(first + i, int(row)) for i, row in enumerate(rows)]


def _informative(groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """The groups whose scores differ, and the others."""
    rewards_R = torch.tensor([s.value for g in groups for s in g.scores])
    group_R = torch.tensor([number for number, g in enumerate(groups) for _ in g.scores])
    keep_R = informative(rewards_R, group_R).tolist()
    kept = {number for number, keep in zip(group_R.tolist(), keep_R, strict=True) if keep}
    return (
        [group for number, group in enumerate(groups) if number in kept],
        [group for number, group in enumerate(groups) if number not in kept],
    )


def _greedy(sampling: Sampling) -> Sampling:
    return Sampling(max_tokens=sampling.max_tokens, temperature=0.0)


class SyncBatches:
    """On-policy: a batch is made when it is asked for, with the weights of that moment."""

    def __init__(self, begin: Callable[[], Make]) -> None:
        self._begin = begin

    def next(self) -> Batch:
        return self._begin()(lambda: None)

    def weights_are_out(self) -> None: ...

    def close(self) -> None: ...


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


class AsyncBatches:
    """Batches are made in threads while training goes on, at most `staleness` weight versions ahead.

    A batch is begun as soon as the weights that it may be too old by are out: so `staleness + 1` are under
    way at most. It waits for its turn here and not at the engines, because new weights would queue there
    behind batches that could have been written with them. Its turn comes with the first engine that has
    written all of the batch before, whose last responses are then still being written elsewhere or scored.

    An engine that hangs in a weight update never gets to a batch behind it. `verifying` gives the outcome of
    the newest update, which has a time limit: its error ends the wait for a batch.
    """

    def __init__(
        self,
        begin: Callable[[], Make],
        staleness: int,
        batches: int,
        verifying: Callable[[], Future[Any]] = _done,
    ) -> None:
        self._begin, self._left, self._verifying = begin, batches, verifying
        self._begun: deque[Future[Batch]] = deque()
        self._turn = _done()
        """Of the batch that is begun next."""
        for _ in range(staleness + 1):
            self._start()

    def _start(self) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        turn, self._turn = self._turn, Future()
        self._begun.append(in_background(partial(_made_in_turn, self._begin(), turn, self._turn)))

    def next(self) -> Batch:
        batch, verifying = self._begun.popleft(), self._verifying()
        if batch not in wait([batch, verifying], return_when=FIRST_COMPLETED).done:
            verifying.result()
        return batch.result()

    def weights_are_out(self) -> None:
        """New weights are on their way to the engines: one more batch is begun behind them."""
        self._start()

    def close(self) -> None:
        """No further batch is begun; one that is being made ends with its workers."""
        self._left = 0


def _made_in_turn(make: Make, turn: Future[None], next_turn: Future[None]) -> Batch:
    def next_may_begin() -> None:
        if not next_turn.done():
            next_turn.set_result(None)

    try:
        turn.result()
        batch = make(next_may_begin)
    except BaseException as error:
        if not next_turn.done():
            next_turn.set_exception(error)
        raise
    next_may_begin()
    return batch
