"""A simulated online run: engines generate, rewards score, ranks update, weights go out."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from simulate.engine import Clock, Engine, Group, Response, Servers
from simulate.settings import Run


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the ranks in one step, part by part, and what the step trained on."""

    generation: float
    """Waiting for the last response."""
    reward: float
    """Waiting for scores, and for the controller to collect them, after that."""
    controller: float
    switch: float
    update: float
    sync: float
    responses: int
    tokens: int
    longest: int
    staleness: int
    """Of the oldest response, in versions."""

    @property
    def total(self) -> float:
        return self.generation + self.reward + self.controller + self.switch + self.update + self.sync


PARTS = ("generation", "reward", "controller", "switch", "update", "sync")


@dataclass(frozen=True)
class Outcome:
    steps: Sequence[StepTimes]
    """All of them."""
    warm_up: int
    """Steps that the means leave out."""
    engines_idle: float
    """Share of the engines' time after the first steps with no sequence and no weights to load."""
    engines_filled: float
    """Running sequences over places, mean over time and engines."""
    generated: int
    """Responses that engines have finished."""
    generated_tokens: int

    @property
    def measured(self) -> Sequence[StepTimes]:
        return self.steps[self.warm_up :]

    @property
    def step_seconds(self) -> float:
        return mean(step.total for step in self.measured)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step, by part."""
        return {part: mean(getattr(step, part) for step in self.measured) for part in PARTS}

    @property
    def ranks_idle(self) -> float:
        """Share of the ranks' time without an update or a sync."""
        return 1.0 - (self.parts["update"] + self.parts["sync"]) / self.step_seconds

    @property
    def responses_per_second(self) -> float:
        return sum(step.responses for step in self.measured) / sum(step.total for step in self.measured)

    @property
    def staleness(self) -> int:
        return max(step.staleness for step in self.steps)


def simulate(run: Run, steps: int, seed: int = 0) -> Outcome:
    """The first steps, which fill the pipeline, are left out of the means."""
    warm_up = math.ceil(run.staleness) + (1 if run.order == "finished" or run.staleness else 0)
    if steps <= warm_up:
        raise ValueError(f"needs more than {warm_up} steps")
    return _Simulation(run, steps, warm_up, seed).outcome()


class _Simulation:
    def __init__(self, run: Run, steps: int, warm_up: int, seed: int) -> None:
        self.run, self.wanted, self.warm_up = run, steps, warm_up
        # Two streams, drawn in the order of prompts: settings that change times do not change lengths.
        self._lengths, self._reward_times = (np.random.default_rng([seed, stream]) for stream in (0, 1))
        self.clock = Clock()
        self.engines = [
            Engine(self.clock, number, run.engines.decode_of(number), run.engines.at_once, self._generated)
            for number in range(run.engines.count)
        ]
        self.rewards = Servers(self.clock, run.rewards.at_once)
        self.controller = Servers(self.clock, 1)
        self.queues: list[deque[Group]] = [
            deque() for _ in range(1 if run.engines.one_queue else run.engines.count)
        ]
        self.drawn = 0
        self.version = 0
        """Of the weights that are out."""
        self.ready: dict[int, Group] = {}
        self._ready_of: Counter[int] = Counter()
        """How many of each batch."""
        self.training = False
        self.begun = 0.0
        """Of the current step."""
        self.steps: list[StepTimes] = []
        self.generated = self.generated_tokens = 0
        self._mark = (0.0, 0.0, 0.0)
        """Time, and the engines' sums, when the first steps were over."""

    def outcome(self) -> Outcome:
        self._submit()
        self._feed_all()
        self.clock.run(lambda: len(self.steps) >= self.wanted)
        assert len(self.steps) == self.wanted, "the simulation stopped before its last step"
        (begun, busy, filled), (now, all_busy, all_filled) = self._mark, self._sums()
        seconds = (now - begun) * len(self.engines)
        return Outcome(
            steps=self.steps,
            warm_up=self.warm_up,
            engines_idle=1.0 - (all_busy - busy) / seconds,
            engines_filled=(all_filled - filled) / (seconds * self.run.engines.at_once),
            generated=self.generated,
            generated_tokens=self.generated_tokens,
        )

    def _sums(self) -> tuple[float, float, float]:
        for engine in self.engines:
            engine.settle()
        busy, filled = sum(e.busy for e in self.engines), sum(e.filled for e in self.engines)
        return self.clock.now, busy, filled

    # Prompts to engines

    def _submit(self) -> None:
        """Draw all prompts that the staleness bound allows with the weights that are out."""
        run = self.run
        allowed = math.floor((self.version + 1 + run.staleness) * run.prompts)
        count = allowed - self.drawn
        if count <= 0:
            return
        lengths_PG = run.lengths.draw(self._lengths, count, run.n)
        for lengths_G in lengths_PG.tolist():
            self.queues[self.drawn % len(self.queues)].append(
                Group(self.drawn, run.prompt_tokens, tuple(lengths_G), ungenerated=run.n)
            )
            self.drawn += 1

    def _feed_all(self) -> None:
        """In rounds of one prompt each, so that none gets all."""
        hungry = self.engines
        while hungry:
            hungry = [engine for engine in hungry if self._feed(engine)]

    def _feed(self, engine: Engine) -> bool:
        """One prompt to an engine, if it may have one."""
        run, queue = self.run, self.queues[engine.number % len(self.queues)]
        if not engine.unfinished and engine.version < self.version:
            engine.load(self.version, run.sync.load)
        may = bool(queue) and engine.unfinished + run.n <= run.width
        if may and engine.unfinished and not run.in_flight:
            may = queue[0].index // run.prompts == engine.batch
        if may:
            group = queue.popleft()
            engine.batch = group.index // run.prompts
            engine.give([Response(group, tokens) for tokens in group.lengths], group.prompt_tokens)
        return may

    # Responses to scores to the controller

    def _generated(self, engine: Engine, response: Response) -> None:
        group = response.group
        group.ungenerated -= 1
        self.generated += 1
        self.generated_tokens += response.tokens
        if not group.ungenerated:
            group.generated_at = self.clock.now
            # Where all scores take the same time and none waits, one event stands for those of a group.
            alike = self.run.rewards.at_once is None and not self.run.rewards.sigma
            group.unscored = 1 if alike else len(group.lengths)
            for _ in range(group.unscored):
                self.rewards.serve(self._reward_seconds(), lambda: self._scored(group))
        while self._feed(engine):
            pass

    def _reward_seconds(self) -> float:
        rewards = self.run.rewards
        if not rewards.sigma:
            return rewards.seconds
        return rewards.seconds * math.exp(rewards.sigma * self._reward_times.standard_normal())

    def _scored(self, group: Group) -> None:
        group.unscored -= 1
        if not group.unscored:
            self.controller.serve(self.run.controller.a_group, lambda: self._collected(group))

    def _collected(self, group: Group) -> None:
        self.ready[group.index] = group
        self._ready_of[group.index // self.run.prompts] += 1
        self._begin_training()

    # The step of the ranks

    def _batch(self) -> list[Group] | None:
        """The groups of this step, if they are there."""
        prompts, number = self.run.prompts, len(self.steps)
        if self.run.order == "finished":
            enough = len(self.ready) >= prompts
            return [self.ready[index] for index in sorted(self.ready)[:prompts]] if enough else None
        if self._ready_of[number] < prompts:
            return None
        return [self.ready[index] for index in range(number * prompts, (number + 1) * prompts)]

    def _begin_training(self) -> None:
        batch = None if self.training else self._batch()
        if batch is None:
            return
        self.training = True
        for group in batch:
            del self.ready[group.index]
        run, now = self.run, self.clock.now
        colocated = run.placement == "colocated"
        if colocated:
            for engine in self.engines:
                engine.pause()
        generated = min(max(self.begun, max(group.generated_at for group in batch)), now)
        times = StepTimes(
            generation=generated - self.begun,
            reward=now - generated,
            controller=run.controller.a_step,
            switch=2 * run.switch if colocated else 0.0,
            update=self._update_seconds(batch),
            sync=run.sync.publish,
            responses=run.n * len(batch),
            tokens=sum(group.tokens for group in batch),
            longest=max(max(group.lengths) for group in batch),
            staleness=len(self.steps) - min(group.version for group in batch),
        )
        self.clock.after(times.total - (now - self.begun), lambda: self._end_step(times))

    def _update_seconds(self, batch: list[Group]) -> float:
        update, seconds = self.run.update, self.run.update.fixed
        size = -(-len(batch) // update.mini_batches)
        for first in range(0, len(batch), size):
            part = batch[first : first + size]
            longest = max(max(group.lengths) + group.prompt_tokens for group in part)
            seconds += max(
                update.per_token * sum(group.tokens for group in part), update.per_token_of_longest * longest
            )
        return seconds

    def _end_step(self, times: StepTimes) -> None:
        self.steps.append(times)
        self.training = False
        self.begun = self.clock.now
        self.version += 1
        if len(self.steps) == self.warm_up:
            self._mark = self._sums()
        self._submit()
        colocated = self.run.placement == "colocated"
        for engine in self.engines:
            if colocated:
                engine.resume()
            if colocated or self.run.in_flight or not engine.unfinished:
                engine.load(self.version, self.run.sync.load)
        self._feed_all()
        self._begin_training()
