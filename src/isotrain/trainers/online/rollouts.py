"""Scored batches of responses: drawn, generated, scored; on demand, or ahead with bounded staleness."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from isotrain.algorithms.rewards import informative
from isotrain.children import in_background
from isotrain.cluster.failures import WorkerDied
from isotrain.cluster.replaceable import DIED, Died, Replaceable, WorkerTask
from isotrain.cluster.workers import Stream, WorkerCall, next_item, wait_any
from isotrain.data.loader import Sampler
from isotrain.errors import WorkerLost
from isotrain.observe.spans import SpanLog
from isotrain.rollout.base import Sampling
from isotrain.trainers.build import TRAIN
from isotrain.trainers.online.engines import Engines, engine_name
from isotrain.trainers.online.messages import Group, PromptRequest, TrajectoriesHandle
from isotrain.trainers.online.metrics import Failures, failures_of
from isotrain.trainers.online.prompt_queue import Draws, PromptQueue
from isotrain.trainers.online.reward_worker import RewardWorker, ScoredGroup
from isotrain.trainers.online.rollout_worker import RolloutWorker, Written

# Of one reward worker: scores that take long, such as a model's over a network, are waited for side by side.
CALLS_AT_ONCE = 4
# Seconds between progress reports while no response comes.
LOOK_SECONDS = 1.0
# Rounds in a row in which nobody died and yet no response came.
MAX_EMPTY_ROUNDS = 3


class Seconds(NamedTuple):
    generating: float
    scoring: float
    """After the last response was there; before that, scoring is hidden behind generation."""

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(self.generating + other.generating, self.scoring + other.scoring)


@dataclass
class Collector:
    engines: Engines
    rewards: Replaceable[RewardWorker]
    rollout_progress: RolloutProgress
    queue: Replaceable[PromptQueue] | None = None
    """That engines draw prompts from; without, each gets an equal part at the beginning."""
    rounds: Iterator[int] = field(default_factory=itertools.count)
    spans: SpanLog = field(default_factory=lambda: SpanLog("controller"))
    """Of reward workers, from here: they may be busy when a profiled step ends."""

    def shares(self, prompt_requests: Sequence[PromptRequest]) -> list[Sequence[PromptRequest] | Draws]:
        """The prompts of each engine that is needed."""
        engines = len(self.engines)
        if self.queue is None:
            return [share for i in range(engines) if (share := prompt_requests[i::engines])]
        number = next(self.rounds)
        while self.queue.result(self.queue.submit(0, PromptQueue.fill, number, prompt_requests)) is DIED:
            pass
        draws = Draws(self.queue.peer(0), number, -(-len(prompt_requests) // engines))
        return [draws] * min(engines, len(prompt_requests))

    def collect(
        self,
        store: str,
        prompt_requests: Sequence[PromptRequest],
        n: int,
        sampling: Sampling,
        engine_is_free: Callable[[], None] = lambda: None,
    ) -> tuple[list[Group], Seconds]:
        """`n` scored responses to each draw, in the order of the draws.

        `engine_is_free` is called whenever an engine may be asked for more: when it has written all that it
        was asked for or, in flight, when it was asked.
        """
        done: dict[int, Group] = {}
        seconds, empty_rounds = Seconds(0.0, 0.0), 0
        what = "responses" if store == TRAIN else f"{store} responses"
        with self.rollout_progress.request(what, len(prompt_requests) * n) as request:
            while missing := [request for request in prompt_requests if request.prompt_index not in done]:
                request.generated = request.scored = len(done) * n
                attempt, deaths = _Round(self, request, store, n, sampling, engine_is_free), self._deaths()
                groups, spent = attempt.run(missing)
                empty_rounds = 0 if groups or self._deaths() > deaths else empty_rounds + 1
                if empty_rounds == MAX_EMPTY_ROUNDS:
                    raise WorkerLost("engines end without a response; can they reach the prompt queue?")
                done |= groups
                seconds = seconds.plus(spent)
        return [done[request.prompt_index] for request in prompt_requests], seconds

    def _deaths(self) -> int:
        groups: list[Replaceable[Any]] = [self.engines, self.rewards]
        return sum(sum(group.deaths) for group in groups + ([self.queue] if self.queue else []))

    def again(
        self,
        store: str,
        groups: Sequence[Group],
        gone: Collection[TrajectoriesHandle],
        n: int,
        sampling: Sampling,
    ) -> list[Group]:
        """The groups, with new responses to those draws whose trajectories are gone."""
        prompt_requests = [
            PromptRequest(g.responses.prompt_index, g.responses.row) for g in groups if g.handle in gone
        ]
        anew, _ = self.collect(store, prompt_requests, n, sampling)
        by_index = {group.responses.prompt_index: group for group in anew}
        return [by_index.get(group.responses.prompt_index, group) for group in groups]


class _Round:
    """One try. Engines that die are replaced; their unfinished draws are not in the result."""

    def __init__(
        self,
        collector: Collector,
        request: RoundRequest,
        store: str,
        n: int,
        sampling: Sampling,
        engine_is_free: Callable[[], None],
    ) -> None:
        self.collector = collector
        self.engines, self.rewards = collector.engines, collector.rewards
        self.rollout_progress, self.request = collector.rollout_progress, request
        self.store, self.n, self.sampling = store, n, sampling
        self.engine_is_free = engine_is_free
        self.streams: list[WorkerTask[Stream[Written]]] = []
        self.backlog: list[Written] = []
        self.scoring: dict[WorkerTask[WorkerCall[list[ScoredGroup | None]]], tuple[list[Written], int]] = {}
        """What each call scores, and its span."""
        self.calls = [0] * len(self.rewards)
        """How many each reward worker is busy with."""
        self.done: dict[int, Group] = {}

    def run(self, prompt_requests: Sequence[PromptRequest]) -> tuple[dict[int, Group], Seconds]:
        started = generated = time.perf_counter()
        arguments = (self.n, self.sampling, self.engines.first_version)
        for index, share in enumerate(self.collector.shares(prompt_requests)):
            self.streams.append(
                self.engines.stream(index, RolloutWorker.generate, self.store, share, *arguments)
            )
            self.rollout_progress.asked(index)
        if self.engines.in_flight:
            self.engine_is_free()
        while self.streams or self.scoring or self.backlog:
            self._send_backlog()
            streams, scoring = list(self.streams), list(self.scoring)
            self.rollout_progress.look(self.request, [task.index for task in streams])
            works: list[WorkerCall[Any] | Stream[Any]] = [task.work for task in streams]
            works += [task.work for task in scoring]
            deadline = time.monotonic() + LOOK_SECONDS
            for number in wait_any(self.engines.group.watch, works, deadline):
                if number < len(streams):
                    self._take_responses(streams[number])
                    generated = time.perf_counter()
                else:
                    self._take_scores(scoring[number - len(streams)])
        return self.done, Seconds(generated - started, time.perf_counter() - generated)

    def _take_responses(self, task: WorkerTask[Stream[Written]]) -> None:
        """One group that an engine has finished, or the end of its work."""
        try:
            self.backlog.append(next_item(self.engines.group, task.work))
            self.rollout_progress.heard_from(task.index)
            self.request.generated += self.n
        except StopIteration:
            self.streams.remove(task)
            self.engine_is_free()
        except WorkerDied as death:
            self.streams.remove(task)
            self.engines.replace(task, death)

    def _send_backlog(self) -> None:
        """Deal out what has come, in equal parts, to as many calls as are free, idle workers first."""
        while self.backlog and (free := len(self.calls) * CALLS_AT_ONCE - sum(self.calls)):
            count = -(-len(self.backlog) // free)
            work, self.backlog = self.backlog[:count], self.backlog[count:]
            items = [(responses.row, handle) for responses, handle in work]
            index = self.calls.index(min(self.calls))
            self.calls[index] += 1
            span = self.collector.spans.open("reward", f"reward worker {index}")
            self.scoring[self.rewards.submit(index, RewardWorker.score, self.store, items)] = (work, span)

    def _take_scores(self, task: WorkerTask[WorkerCall[list[ScoredGroup | None]]]) -> None:
        work, span = self.scoring.pop(task)
        self.calls[task.index] -= 1
        self.collector.spans.close(span)
        scored = self.rewards.result(task)
        if isinstance(scored, Died):
            self.backlog += work
            return
        for (responses, handle), scored_group in zip(work, scored, strict=True):
            # None where the responses died with their engine: the draw is missing, and generated again.
            if scored_group is not None:
                source, scores = scored_group
                self.done[responses.prompt_index] = Group(responses, handle, scores, source)
                self.request.scored += self.n


# A group of responses comes when its longest is there, which takes minutes where responses are long.
PATIENCE_SECONDS = 300.0


class RoundRequest:
    """Responses that were requested together."""

    def __init__(self, what: str, total: int, begun: float) -> None:
        self.what, self.total, self.begun = what, total, begun
        self.generated = self.scored = 0

    def describe(self, now: float) -> str:
        return f"{self.what} {self.generated} of {self.total}, {self.scored} scored, {now - self.begun:.0f} s"


class RolloutProgress:
    def __init__(
        self,
        show: Callable[[str], None],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`show` replaces what it was given before, and is given nothing at the end; `tell` is a warning."""
        self._show, self._tell, self._clock = show, tell, clock
        self._open: list[RoundRequest] = []
        self._last_response: dict[int, float] = {}
        """When each engine was asked for something, or gave something, last."""
        self._warned: set[int] = set()
        self._patience = PATIENCE_SECONDS

    @contextmanager
    def request(self, what: str, total: int) -> Iterator[RoundRequest]:
        """Batches that are made ahead overlap: the newest is shown."""
        request = RoundRequest(what, total, self._clock())
        self._open.append(request)
        try:
            yield request
        finally:
            self._open.remove(request)
            if not self._open:
                self._show("")

    def asked(self, engine: int) -> None:
        self._last_response[engine] = self._clock()
        self._warned.discard(engine)

    def heard_from(self, engine: int) -> None:
        now = self._clock()
        if engine in self._warned:  # it was slow and not stuck: the warning comes later from now on
            self._warned.discard(engine)
            self._patience = max(self._patience, 2 * (now - self._last_response[engine]))
        self._last_response[engine] = now

    def look(self, request: RoundRequest, writing: Collection[int]) -> None:
        """Show how far a request is, and warn of engines that should be writing and give nothing."""
        now = self._clock()
        if self._open[-1:] == [request]:
            self._show(request.describe(now))
        for engine in writing:
            silent = now - self._last_response[engine]
            if silent >= self._patience and engine not in self._warned:
                self._warned.add(engine)
                self._tell(
                    f"warning: {engine_name(engine)} has finished no response for {silent:.0f} s: "
                    "its responses are very long, or it hangs"
                )


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
    """Failures of responses that are not among the groups: replaced ones, and greedy ones."""


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
        count = len(prompt_requests)
        free = (lambda: None) if self.one_by_one else next_may_begin
        groups, seconds = self.collector.collect(TRAIN, prompt_requests, self.n, self.sampling, free)
        resampled, others = 0, Failures()
        for _ in range(self.attempts):
            kept, dropped = _informative(groups)
            missing = count - len(kept)
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

    def weights_published(self) -> None: ...

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
    In flight no weights wait for responses: the turn comes as soon as the batch before has been asked for.

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
        """The turn of the batch that is begun next."""
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

    def weights_published(self) -> None:
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
