"""Progress of the engines, for the console."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from isotrain.trainers.online.engines import engine_name

# A group of responses comes when its longest is there, which takes minutes where responses are long.
PATIENCE_SECONDS = 300.0


class Request:
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
        self._open: list[Request] = []
        self._heard: dict[int, float] = {}
        """When each engine was asked for something, or gave something, last."""
        self._told: set[int] = set()
        self._patience = PATIENCE_SECONDS

    @contextmanager
    def request(self, what: str, total: int) -> Iterator[Request]:
        """Batches that are made ahead overlap: the newest is shown."""
        request = Request(what, total, self._clock())
        self._open.append(request)
        try:
            yield request
        finally:
            self._open.remove(request)
            if not self._open:
                self._show("")

    def asked(self, engine: int) -> None:
        self._heard[engine] = self._clock()
        self._told.discard(engine)

    def heard_from(self, engine: int) -> None:
        now = self._clock()
        if engine in self._told:  # it was slow and not stuck: the warning comes later from now on
            self._told.discard(engine)
            self._patience = max(self._patience, 2 * (now - self._heard[engine]))
        self._heard[engine] = now

    def look(self, request: Request, writing: Collection[int]) -> None:
        """Show how far a request is, and warn of engines that should be writing and give nothing."""
        now = self._clock()
        if self._open[-1:] == [request]:
            self._show(request.describe(now))
        for engine in writing:
            silent = now - self._heard[engine]
            if silent >= self._patience and engine not in self._told:
                self._told.add(engine)
                self._tell(
                    f"warning: {engine_name(engine)} has finished no response for {silent:.0f} s: "
                    "its responses are very long, or it hangs"
                )
