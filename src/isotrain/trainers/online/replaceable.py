"""Workers that know nothing the others do not: one that dies is replaced, a bounded number of times."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isotrain.cluster.failures import WorkerDied
from isotrain.cluster.streams import Stream, open_stream
from isotrain.cluster.workers import Call, WorkerGroup
from isotrain.errors import ClusterError

MOST_DEATHS = 10


@dataclass(frozen=True)
class Task:
    """What one worker is doing, and how many have died in its place before."""

    index: int
    life: int
    work: Call | Stream


class Replaceable:
    def __init__(self, group: WorkerGroup, start_timeout: float, tell: Callable[[str], None]) -> None:
        self.group = group
        self.start_timeout = start_timeout
        self.tell = tell
        self.lives = [0] * len(group)
        # Batches are made in a thread of their own while the loop validates: both may meet the same death.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self.group)

    def submit(self, index: int, method: str, *args: Any) -> Task:
        return Task(index, self.lives[index], self.group.submit_to(index, method, *args))

    def stream(self, index: int, method: str, *args: Any) -> Task:
        return Task(index, self.lives[index], open_stream(self.group, index, method, *args))

    def result(self, task: Task, timeout: float | None = None) -> Any:
        """What a worker answered, or None if it died; there is a new one in its place then."""
        assert isinstance(task.work, Call)
        try:
            return self.group.results([task.work], timeout)[0]
        except WorkerDied as death:
            self.replace(task, death)
            return None

    def on_all(self, method: str) -> None:
        """Run a method on every worker, and wait; one that died has been replaced."""
        for task in [self.submit(index, method) for index in range(len(self))]:
            self.result(task)

    def replace(self, task: Task, death: WorkerDied) -> None:
        """A new worker in the place of one that died, unless another thread has seen to it already."""
        with self._lock:
            if self.lives[task.index] != task.life:
                return
            self.lives[task.index] += 1
            if sum(self.lives) > MOST_DEATHS:
                raise ClusterError(
                    f"{death}\n{sum(self.lives)} such workers died in this run: giving up"
                ) from death
            self.tell(f"warning: {death}\na new one takes its place")
            self.group.restart(task.index)
            self.prepare(task.index)

    def prepare(self, index: int) -> None:
        """Make a new worker ready."""
        self.group.call_on(index, "start", timeout=self.start_timeout)
