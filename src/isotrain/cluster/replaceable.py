"""Stateless workers: one that dies is replaced, a bounded number of times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from isotrain.cluster.failures import WorkerDied
from isotrain.cluster.workers import Method, P, Result, Stream, WorkerCall, WorkerGroup, WorkerPeer
from isotrain.errors import WorkerLost

# In one place: a worker that dies again and again has a cause that a new one does not cure.
MOST_DEATHS = 10


class Died:
    """The result of a call to a worker that died and was replaced."""


DIED = Died()


Work = TypeVar("Work", bound="WorkerCall[Any] | Stream[Any]", covariant=True)


@dataclass(frozen=True)
class WorkerTask(Generic[Work]):
    """Work of one worker, and how many workers had died in its place when it began."""

    index: int
    deaths: int
    work: Work


class Startable(Protocol):
    def start(self) -> object:
        """Load what it needs; all other calls come after it."""


W = TypeVar("W", bound=Startable)


class Replaceable(Generic[W]):
    def __init__(self, group: WorkerGroup[W], start_timeout: float, tell: Callable[[str], None]) -> None:
        self.group = group
        self.start_timeout = start_timeout
        self.tell = tell
        self.deaths = [0] * len(group)
        # Batches are made in a thread of their own while the loop validates: both may meet the same death,
        # and neither may give work to a worker that is still being started.
        self._places = [threading.RLock() for _ in range(len(group))]

    def __len__(self) -> int:
        return len(self.group)

    def submit(
        self, index: int, method: Method[W, P, Result], *args: P.args, **kwargs: P.kwargs
    ) -> WorkerTask[WorkerCall[Result]]:
        with self._places[index]:
            return WorkerTask(index, self.deaths[index], self.group.submit_to(index, method, *args, **kwargs))

    def submit_beside(
        self, index: int, method: Method[W, P, Result], *args: P.args, **kwargs: P.kwargs
    ) -> WorkerTask[WorkerCall[Result]]:
        with self._places[index]:
            call = self.group.submit_beside(index, method, *args, **kwargs)
            return WorkerTask(index, self.deaths[index], call)

    def stream(
        self, index: int, method: Method[W, P, Iterator[Result]], *args: P.args, **kwargs: P.kwargs
    ) -> WorkerTask[Stream[Result]]:
        with self._places[index]:
            return WorkerTask(index, self.deaths[index], self.group.stream(index, method, *args, **kwargs))

    def peer(self, index: int) -> WorkerPeer[W]:
        """One worker, for others to call; not one that is being replaced."""
        with self._places[index]:
            return self.group.peer(index)

    def result(self, task: WorkerTask[WorkerCall[Result]], timeout: float | None = None) -> Result | Died:
        """The result of a worker's call, or DIED."""
        try:
            return self.group.results([task.work], timeout)[0]
        except WorkerDied as death:
            self.replace(task, death)
            return DIED

    def on_all(self, method: Callable[[W], object], timeout: float | None = None) -> None:
        """Run a method on every worker, also on those that take the place of one that dies at it."""
        for task in [self.submit(index, method) for index in range(len(self))]:
            while self.result(task, timeout) is DIED:
                task = self.submit(task.index, method)

    def post(self, method: Method[W, P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Queue a method behind what every worker is doing, without waiting for anything."""
        for index in range(len(self)):
            self.submit(index, method, *args, **kwargs)

    def replace(self, task: WorkerTask[Any], death: WorkerDied) -> None:
        """A new worker in the place of one that died, unless another thread has seen to it already."""
        index = task.index
        with self._places[index]:
            if self.deaths[index] != task.deaths:
                return
            if self.group.closed:  # the run is over: it was ended, and did not die
                raise death
            while True:
                self.deaths[index] += 1
                if self.deaths[index] > MOST_DEATHS:
                    raise WorkerLost(
                        f"{death}\n{self.deaths[index]} workers died in this place: giving up"
                    ) from death
                self.tell(f"warning: {death}\na new worker replaces it")
                try:
                    self.group.restart(index)
                    self.prepare(index)
                    return
                except WorkerDied as another:
                    death = another

    def prepare(self, index: int) -> None:
        """Make a new worker ready; raises WorkerDied where that kills it."""
        self.group.within(self.start_timeout).call_on(index, Startable.start)
