"""Engines without Ray or a model: threads that do one thing after the other, as the real workers do."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from isotrain.cluster.failures import Overdue
from isotrain.cluster.objects import Handle
from isotrain.cluster.workers import WorkerCall
from isotrain.rollout.base import Sampling
from isotrain.trainers.online.engines import Engines, Weights
from isotrain.trainers.online.messages import Group, PromptRequest, Responses, Score
from isotrain.trainers.online.rollouts import Collector, Seconds
from isotrain.weights.check import Tolerance

CHECK_PROMPTS = [np.zeros(4, np.int32)]
LOGPS = np.zeros(3, np.float32)


class StandInGroup:
    """In the place of a group of one engine. Responses take `seconds`, `update` hangs at one version."""

    def __init__(self, seconds: float = 0.0, hangs_at: int | None = None) -> None:
        self.seconds, self.hangs_at, self.version = seconds, hangs_at, 0
        self.called: list[str] = []
        """Of the calls that change what is on the device."""
        self.begun: list[str] = []
        """All calls, as the engine comes to them."""
        self.limits: list[float | None] = []
        """How long each result may be waited for."""
        self._tasks: queue.Queue[tuple[Future[Any], str, tuple[Any, ...]]] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def __len__(self) -> int:
        return 1

    def _work(self) -> None:
        while True:
            future, method, args = self._tasks.get()
            self.begun.append(method)
            future.set_result(getattr(self, method)(*args))

    def submit_to(self, index: int, method: Callable[..., Any], *args: Any) -> WorkerCall[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, method.__name__, args))
        return WorkerCall(index, method.__name__, future)  # type: ignore[arg-type]

    def results(self, calls: Sequence[WorkerCall[Any]], timeout: float | None = None) -> list[Any]:
        self.limits.append(timeout)
        try:
            return [call.ref.result(timeout) for call in calls]  # type: ignore[attr-defined]
        except TimeoutError:
            raise Overdue("late") from None

    def report(self) -> None: ...

    def release(self, done: int) -> None: ...

    def respond(self, wait: Callable[[], None]) -> int:
        """What an engine does for a whole batch."""
        time.sleep(self.seconds)
        wait()
        return self.version

    def sleep(self) -> None:
        self.called.append("sleep")

    def wake(self) -> None:
        self.called.append("wake")

    def update(self, update: int) -> int:
        """An update is its version here."""
        self.called.append("update")
        if update == self.hangs_at:
            threading.Event().wait()
        self.version = update
        return update

    def update_and_check(self, update: int, prompts: Any) -> tuple[int, Any]:
        return self.update(update), LOGPS


def stand_in_engines(group: StandInGroup, timeout: float = 10.0, in_flight: bool = False) -> Engines:
    wide = Tolerance.fixed(1.0)
    options: Any = {
        "check_prompts": CHECK_PROMPTS,
        "timeout": timeout,
        "tolerance": wide,
        "in_flight": in_flight,
    }
    return Engines(group, 10.0, print, **options)  # type: ignore[arg-type]


def weights(version: int) -> Weights:
    return Weights(version, [version], LOGPS)  # type: ignore[list-item]


class StandInCollector(Collector):
    """In the place of a Collector; `value` is the score of a response, by its draw and its number."""

    def __init__(
        self,
        engines: Engines,
        value: Callable[[int, int], float] = lambda prompt_index, sample: float(sample),
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.engines, self.value, self.wait = engines, value, wait
        self.asked: list[tuple[str, list[int], int, float]] = []
        """Of each call the store, the draws, how many responses and at which temperature."""
        self._handles = itertools.count()

    def collect(
        self,
        store: str,
        prompt_requests: Sequence[PromptRequest],
        n: int,
        sampling: Sampling,
        engine_is_free: Callable[[], None] = lambda: None,
    ) -> tuple[list[Group], Seconds]:
        self.asked.append(
            (store, [request.prompt_index for request in prompt_requests], n, sampling.temperature)
        )
        respond: Any = StandInGroup.respond
        version: Any = self.engines.result(self.engines.submit(0, respond, self.wait))
        engine_is_free()
        return [self._group(request, n, version) for request in prompt_requests], Seconds(0.0, 0.0)

    def _group(self, request: PromptRequest, n: int, version: int) -> Group:
        lengths, finished = (2,) * n, (True,) * n
        responses = Responses(
            request.prompt_index, request.row, 3, lengths, lengths, finished, version, version
        )
        scores = tuple(Score(self.value(request.prompt_index, sample), {}, None, "") for sample in range(n))
        return Group(responses, Handle(next(self._handles)), scores, "data")
