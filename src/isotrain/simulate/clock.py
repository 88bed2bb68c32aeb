"""Simulated time: events in order of time, and of arrival where times are equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable


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
