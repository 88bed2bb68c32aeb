"""The scored batches that training consumes: made on demand, or ahead by a bounded number of steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from isotrain.algorithms.dapo import informative
from isotrain.data.sampler import Sampler
from isotrain.rollout.base import Sampling
from isotrain.trainers.online.collector import Collector, Seconds
from isotrain.trainers.online.messages import Group, Ticket
from isotrain.trainers.online.prompts import TRAIN


@dataclass(frozen=True)
class Batch:
    groups: list[Group]
    greedy: dict[int, float] | None
    """Score of the greedy answer to each draw, where the algorithm compares with it."""
    taken: int
    """Prompts drawn up to and with this batch."""
    seconds: Seconds
    resampled: int
    """Groups that taught nothing and were replaced."""


class BatchMaker:
    """Draws prompts and has them answered; everything about a batch but when it is made."""

    def __init__(
        self, collector: Collector, sampler: Sampler, n: int, sampling: Sampling, attempts: int, greedy: bool
    ) -> None:
        self.collector = collector
        self.sampler = sampler
        self.n = n
        self.sampling = sampling
        self.attempts = attempts
        self.greedy = greedy

    def make(self) -> Batch:
        wanted = len(tickets := self._draw(self.sampler.batch_size))
        groups, seconds = self.collector.collect(TRAIN, tickets, self.n, self.sampling)
        resampled = 0
        for _ in range(self.attempts):
            kept = _informative(groups)
            missing = wanted - len(kept)
            if not missing:
                break
            more, extra = self.collector.collect(TRAIN, self._draw(missing), self.n, self.sampling)
            groups, seconds, resampled = kept + more, seconds.plus(extra), resampled + missing
        greedy = None
        if self.greedy:
            places = [Ticket(g.answers.place, g.answers.row) for g in groups]
            best, extra = self.collector.collect(TRAIN, places, 1, _greedy(self.sampling))
            greedy = {g.answers.place: g.scores[0].value for g in best}
            seconds = seconds.plus(extra)
        return Batch(groups, greedy, self.sampler.taken, seconds, resampled)

    def again(self, groups: list[Group], gone: Collection[Any]) -> list[Group]:
        """The groups with new answers to those draws whose trajectories are gone."""
        tickets = [Ticket(g.answers.place, g.answers.row) for g in groups if g.handle in gone]
        anew, _ = self.collector.collect(TRAIN, tickets, self.n, self.sampling)
        by_place = {group.answers.place: group for group in anew}
        return [by_place.get(group.answers.place, group) for group in groups]

    def _draw(self, count: int) -> list[Ticket]:
        first = self.sampler.taken
        draw = replace(self.sampler, batch_size=count)
        rows = draw.next_batch()
        self.sampler.taken = draw.taken
        return [Ticket(first + i, int(row)) for i, row in enumerate(rows)]


def _informative(groups: list[Group]) -> list[Group]:
    rewards_R = torch.tensor([s.value for g in groups for s in g.scores])
    group_R = torch.tensor([number for number, g in enumerate(groups) for _ in g.scores])
    keep_R = informative(rewards_R, group_R).tolist()
    kept = {number for number, keep in zip(group_R.tolist(), keep_R, strict=True) if keep}
    return [group for number, group in enumerate(groups) if number in kept]


def _greedy(sampling: Sampling) -> Sampling:
    return Sampling(max_tokens=sampling.max_tokens, temperature=0.0)


class OnDemand:
    """On-policy: a batch is made when it is asked for, with the weights of that moment."""

    def __init__(self, make: Callable[[], Batch]) -> None:
        self.make = make

    def next(self) -> Batch:
        return self.make()

    def weights_are_out(self) -> None: ...

    def close(self) -> None: ...


class Ahead:
    """Batches are made in a thread while training goes on, at most `staleness` weight versions ahead.

    A batch may be begun as soon as the weights that it may be too old by are out: so the queue is bounded by
    the same number.
    """

    def __init__(self, make: Callable[[], Batch], staleness: int, batches: int) -> None:
        self._make = make
        self._left = batches
        self._may_begin = threading.Semaphore(staleness + 1)
        self._made: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for _ in range(self._left):
                self._may_begin.acquire()
                if self._closed:
                    return
                self._made.put(self._make())
        except BaseException as error:  # raised where the batch is asked for
            self._made.put(error)

    def next(self) -> Batch:
        made = self._made.get()
        if isinstance(made, BaseException):
            raise made
        return made

    def weights_are_out(self) -> None:
        """New weights are on their way to the engines: one more batch may be begun behind them."""
        self._may_begin.release()

    def close(self) -> None:
        """No further batch is begun; one that is being made ends with its workers."""
        self._closed = True
        self._may_begin.release()
