"""One rollout engine: sequences that share its speed, found by the tokens that each still needs.

All running sequences get their next token together. So one number, the tokens that a sequence would have had
if it had run from the start, tells how far each of them is: a sequence ends at the number where it began plus
its length. The next to end is the top of a heap, whatever happens to the speed in between.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from simulate.settings import Decode


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (max(time, self.now), self._count, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now + seconds, act)

    def run(self, until: Callable[[], bool]) -> None:
        """Until `until` says so, or nothing is left to happen."""
        while self._events and not until():
            self.now, _, act = heapq.heappop(self._events)
            act()


class Servers:
    def __init__(self, clock: Clock, places: int | None) -> None:
        self.clock, self.places = clock, places
        self._free_at: list[float] = []
        self.busy = 0.0

    def serve(self, seconds: float, done: Callable[[], None]) -> None:
        self.busy += seconds
        begin = self.clock.now
        if self.places is not None and len(self._free_at) >= self.places:
            begin = max(begin, heapq.heappop(self._free_at))
        if self.places is not None:
            heapq.heappush(self._free_at, begin + seconds)
        self.clock.at(begin + seconds, done)


@dataclass(eq=False)
class Group:
    index: int
    """Of the prompt, in the order in which prompts are drawn."""
    prompt_tokens: int
    lengths: tuple[int, ...]
    version: int = sys.maxsize
    """The oldest weights that began one of its responses."""
    ungenerated: int = 0
    unscored: int = 0
    generated_at: float = 0.0

    @property
    def tokens(self) -> int:
        """That the ranks compute: the prompt once, and all responses."""
        return self.prompt_tokens + sum(self.lengths)


@dataclass(eq=False)
class Response:
    group: Group = field(repr=False)
    tokens: int


class Engine:
    def __init__(
        self,
        clock: Clock,
        number: int,
        decode: Decode,
        at_once: int,
        finished: Callable[[Engine, Response], None],
    ) -> None:
        self.clock, self.number, self.decode, self.at_once = clock, number, decode, at_once
        self.finished = finished
        self.version = 0
        self.batch = -1
        """That it works on, where batches follow one another."""
        self.waiting: deque[Response] = deque()
        self._running: list[tuple[float, int, Response]] = []
        self._tokens = 0.0
        self._offset = 0.0
        """Sum over running sequences of where they began minus their prompts' tokens."""
        self._since = 0.0
        self._frozen = 0.0
        """Until when it decodes nothing, because it computes prompts or loads weights."""
        self._paused = False
        self._plan = 0
        self._begun = 0
        self.busy = 0.0
        """Seconds with something to do."""
        self.filled = 0.0
        """Integral of running sequences over time."""

    @property
    def unfinished(self) -> int:
        return len(self._running) + len(self.waiting)

    def give(self, responses: Iterable[Response], prompt_tokens: int) -> None:
        """The responses to one prompt."""
        self._advance()
        self.waiting.extend(responses)
        self._freeze(self.decode.prefill_per_token * prompt_tokens)
        self._admit()
        self._schedule()

    def load(self, version: int, seconds: float) -> None:
        """New weights: running sequences stop for it, and continue."""
        self._advance()
        self.version = version
        self._freeze(seconds)
        self._schedule()

    def pause(self) -> None:
        self._advance()
        self._paused = True
        self._schedule()

    def resume(self) -> None:
        self._advance()
        self._paused = False
        self._schedule()

    def settle(self) -> None:
        """Bring the sums up to now."""
        self._advance()

    def _freeze(self, seconds: float) -> None:
        if seconds:
            self._frozen = max(self._frozen, self.clock.now) + seconds

    def _pace(self) -> tuple[float, float]:
        """Seconds for d tokens from here: a d + b d^2."""
        running, cached = len(self._running), self.decode.per_cached_token
        tokens = running * self._tokens - self._offset
        return (
            self.decode.base + self.decode.per_sequence * running + cached * tokens,
            cached * running / 2,
        )

    def _advance(self) -> None:
        now, begun = self.clock.now, self._since
        self._since = now
        if self._paused:
            return
        if not self._running:
            self.busy += max(0.0, min(now, self._frozen) - begun)  # loading weights
            return
        self.busy += now - begun
        self.filled += (now - begun) * len(self._running)
        seconds = now - max(begun, self._frozen)
        if seconds > 0:
            a, b = self._pace()
            # The stable form of the positive root of b d^2 + a d = seconds.
            self._tokens += 2 * seconds / (a + math.sqrt(a * a + 4 * b * seconds)) if a or b else math.inf

    def _admit(self) -> None:
        while self.waiting and len(self._running) < self.at_once:
            response = self.waiting.popleft()
            response.group.version = min(response.group.version, self.version)
            self._begun += 1
            heapq.heappush(self._running, (self._tokens + response.tokens, self._begun, response))
            self._offset += self._tokens - response.group.prompt_tokens

    def _schedule(self) -> None:
        """The event of the next sequence that ends; earlier plans are void."""
        self._plan += 1
        if self._paused or not self._running:
            return
        plan, left = self._plan, max(0.0, self._running[0][0] - self._tokens)
        a, b = self._pace()
        seconds = a * left + b * left * left
        self.clock.at(max(self.clock.now, self._frozen) + seconds, lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        self._tokens = self._running[0][0]  # exactly, not up to rounding
        ended = []
        while self._running and self._running[0][0] <= self._tokens:
            end, _, response = heapq.heappop(self._running)
            self._offset -= end - response.tokens - response.group.prompt_tokens
            ended.append(response)
        if not self._running:
            self._offset = 0.0
        self._admit()
        self._schedule()
        for response in ended:
            self.finished(self, response)
