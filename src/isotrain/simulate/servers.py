"""A first-come-first-served station with a number of places: reward workers, the controller."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from isotrain.simulate.clock import Clock


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
