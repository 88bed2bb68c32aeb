"""The thread that owns an engine: it serves several calls at once and takes new weights between tokens."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from isotrain.data.trajectory import Trajectory
from isotrain.errors import EngineLost, RolloutError
from isotrain.rollout.base import Request, RolloutEngine, Sampling
from isotrain.trainers.online.messages import PromptRequest
from isotrain.trainers.online.prompt_queue import Supply
from isotrain.weights.update import WeightUpdate

T = TypeVar("T")


class _Abandoned(Exception):
    """Nobody waits for the responses that are being generated."""


class ResponseSink(Protocol):
    """Where finished responses go."""

    def put(self, group: list[Trajectory] | BaseException | None, /) -> None: ...


class TurnSupply:
    """Filled by episodes from their own thread. To the engine, each turn is a draw with one response."""

    def __init__(self, width: int) -> None:
        self.width = width
        """Turns that the engine may have at a time."""
        self.under_way = True
        """Until it is closed: episodes that wait for their environments are no reason to change weights."""
        self._waiting: deque[Request] = deque()
        self._taken: dict[int, Request] = {}

    @property
    def ready(self) -> bool:
        return bool(self._waiting) or not self.under_way

    @property
    def exhausted(self) -> bool:
        return not self.under_way and not self._waiting

    def add(self, turn: Request) -> None:
        """`turn.prompt_index` is a number of its own."""
        self._waiting.append(turn)

    def close(self) -> None:
        """No more will come."""
        self.under_way = False

    def take(self, unfinished: int, width: int = 0) -> Sequence[PromptRequest]:
        taken: list[PromptRequest] = []
        while self._waiting and unfinished + len(taken) < max(self.width, width):
            turn = self._waiting.popleft()
            self._taken[turn.prompt_index] = turn
            taken.append(PromptRequest(turn.prompt_index, turn.row))
        return taken

    def requests(self, taken: Sequence[PromptRequest]) -> list[Request]:
        return [self._taken.pop(prompt_index) for prompt_index, _ in taken]


@dataclass(eq=False)
class Prompts:
    """The prompts of one call, and the responses to them so far."""

    supply: Supply | TurnSupply
    requests: Callable[[Sequence[PromptRequest]], list[Request]]
    """`n` for each prompt."""
    n: int
    sampling: Sampling
    version: int = 0
    """The update that must come first."""
    urgent: bool = False
    """Whether it goes before calls that came earlier."""
    groups: dict[int, list[Trajectory]] = field(default_factory=dict)
    """The responses so far to each prompt sample that is begun and not finished."""
    finished: ResponseSink = field(default_factory=lambda: cast(ResponseSink, queue.SimpleQueue()))
    """All responses to a draw each; then None, or an error."""


class EngineLoop:
    """Everything that happens to the engine happens in one thread: devices keep some state by thread.

    Calls of `generate` are served in the order in which they come. Prompts of a later one begin as soon as
    the earlier ones have none left and fewer responses are under way than one call may have: so the long
    responses at the end of a call do not leave the engine idle. Calls with another sampling wait for the end
    of those before them.

    What else is to be done is done when the engine is idle and no episode under way; `in_flight`, or where it
    does not touch the model, between two tokens.
    """

    def __init__(self, build: Callable[[], RolloutEngine], in_flight: bool = False) -> None:
        self._changed = threading.Condition()
        self._calls: list[Prompts] = []
        self._acts: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._acts_beside: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        """Those that do not wait until the engine is idle."""
        self._owners: dict[int, Prompts] = {}
        """The call of each prompt sample that is begun and not finished."""
        self._unfinished = 0
        """Responses that the engine has to generate."""
        self._version = 0
        """The last update, also one that failed: the engine itself refuses to generate after it."""
        self.in_flight = False
        threading.Thread(target=self._work, name="engine", daemon=True).start()
        self.engine = self.run(build)
        self.in_flight = in_flight and self.engine.updates_in_flight

    def run(self, act: Callable[[], T], *, beside: bool = False) -> T:
        """Call `act` in the engine's thread, `beside` what it generates; returns or raises as it does."""
        future: Future[T] = Future()
        with self._changed:
            (self._acts_beside if beside else self._acts).append((act, future))
            self._changed.notify_all()
        return future.result()

    def update(self, update: WeightUpdate) -> None:
        def act() -> None:
            try:
                self.engine.update_weights(update)
            finally:
                self._version = update.version

        self.run(act)

    def generate(self, prompts: Prompts) -> Iterator[list[Trajectory]]:
        """All responses to a draw together, as soon as the last of them is there."""
        finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        prompts.finished = finished
        self.serve(prompts)
        try:
            while (group := finished.get()) is not None:
                if isinstance(group, BaseException):
                    raise group
                yield group
        finally:
            self._remove(prompts)

    def serve(self, prompts: Prompts) -> None:
        """Responses go to `prompts.finished` as they come."""
        with self._changed:
            self._calls.insert(0 if prompts.urgent else len(self._calls), prompts)
            self._changed.notify_all()

    def look_again(self) -> None:
        """A supply has something new."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End the engine, whatever it is doing."""
        self._fail(RolloutError(f"{self.engine.name} was closed"))
        self.run(self.engine.close)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._acts_beside or self._may_act() or self._ready())
            self._act(self._acts_beside)
            if self._may_act():
                self._act(self._acts)
            if ready := self._ready():
                self._generate(ready[0].sampling)

    def _may_act(self) -> bool:
        return bool(self._acts) and (self.in_flight or not any(call.supply.under_way for call in self._calls))

    def _ready(self) -> list[Prompts]:
        """Calls that can be served together and have something for the engine."""
        return [call for call in self._due() if call.supply.ready or call.groups]

    def _act(self, acts: deque[tuple[Callable[[], Any], Future[Any]]]) -> EngineLost | None:
        """Do what waits to be done; returns how the engine was lost by it."""
        lost = None
        while acts:
            act, future = acts.popleft()
            try:
                future.set_result(act())
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)
                lost = error if isinstance(error, EngineLost) else lost
        return lost

    def _due(self, sampling: Sampling | None = None) -> list[Prompts]:
        """Calls that can be served together, with the given sampling or the first one's."""
        due: list[Prompts] = []
        with self._changed:
            for call in self._calls:
                if call.version > self._version or call.sampling != (sampling or call.sampling):
                    break
                sampling = call.sampling
                due.append(call)
        return due

    def _generate(self, sampling: Sampling) -> None:
        def more() -> list[Request]:
            return self._more(sampling)

        try:
            for trajectory in self.engine.generate(more(), sampling, more):
                self._hand_over(trajectory)
        except _Abandoned:
            pass
        except BaseException as error:
            self._fail(error)
        finally:  # the engine has nothing left, also where it did not generate all that it was asked for
            for index, call in self._owners.items():
                del call.groups[index]
            self._owners, self._unfinished = {}, 0

    def _more(self, sampling: Sampling) -> list[Request]:
        """Asked by the engine between two tokens."""
        if not self._calls:
            raise _Abandoned
        for acts in (self._acts_beside, self._acts) if self.in_flight else (self._acts_beside,):
            if lost := self._act(acts):
                raise lost
        requests: list[Request] = []
        due = self._due(sampling)
        width = max((call.supply.width * call.n for call in due), default=0) if self.in_flight else 0
        for call in due:
            requests += self._begin(call, width)
            if call.supply.exhausted:
                if not call.groups:
                    self._remove(call)
                    call.finished.put(None)
            elif call.supply.ready:  # it has more than there is room for
                break
        return requests

    def _begin(self, call: Prompts, width: int) -> list[Request]:
        """As many prompts of a call as there is room for; `width` counts responses."""
        taken = call.supply.take(-(-self._unfinished // call.n), width // call.n)
        for index, _ in taken:
            assert index not in self._owners, f"draw {index} is asked for twice at a time"
            self._owners[index], call.groups[index] = call, []
        self._unfinished += len(taken) * call.n
        return call.requests(taken)

    def _hand_over(self, trajectory: Trajectory) -> None:
        self._unfinished -= 1
        call = self._owners[trajectory.prompt_index]
        group = call.groups[trajectory.prompt_index]
        group.append(trajectory)
        if len(group) == call.n:
            del self._owners[trajectory.prompt_index], call.groups[trajectory.prompt_index]
            call.finished.put(sorted(group, key=lambda t: t.sample))

    def _remove(self, call: Prompts) -> None:
        with self._changed:
            if call in self._calls:
                self._calls.remove(call)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            calls, self._calls = self._calls, []
        for call in calls:
            call.finished.put(error)
