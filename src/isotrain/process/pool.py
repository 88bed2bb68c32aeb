"""A pool of child processes that compute results of calls, each call with its own time limit and failure."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from isotrain.errors import IsotrainError, one_line
from isotrain.process.child import BrokenChild, Child, Message

# An async call is ended by its own loop. Only when that does not happen is the loop itself blocked.
GRACE = 1.0
STARTS = 3
# Seconds before another start, more after each that failed: the system may be short of processes or files.
PAUSE = 1.0

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Calls(Generic[Item, Result]):
    """The requests to children, and how their replies are read."""

    load: str
    """`module:function` that returns the function of requests, in the child."""
    child: str
    """How errors call a child."""
    error: type[IsotrainError]
    write: Callable[[Item], Message]
    """The request for an item."""
    read: Callable[[Message], Result | None]
    """The result of a reply, or of `{failure, detail}`; None if it is invalid."""


@dataclass(eq=False)
class _PendingCall:
    line: bytes
    future: Future[Any]
    identity: int
    submitted: float
    suspect: bool = False
    """In flight with other calls when their child had to be ended, so it is repeated alone."""
    begun: bool = False
    deadline: float = math.inf


@dataclass(eq=False)
class _Worker:
    child: Child
    born: float
    start_deadline: float
    ready: bool = False
    alone: bool = False
    retiring: bool = False
    """Gets no more calls, and is ended once those in flight are done."""
    served: int = 0
    calls: dict[int, _PendingCall] = field(default_factory=dict)

    def events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.child.wants_to_write else 0)

    def deadline(self) -> float:
        if not self.ready:
            return self.start_deadline
        return min((call.deadline for call in self.calls.values()), default=math.inf)


class Pool(Generic[Item, Result]):
    """All children belong to one thread: the kernel ends them with the thread that started them."""

    def __init__(
        self,
        calls: Calls[Item, Result],
        arguments: Message,
        *,
        name: str,
        timeout: float,
        processes: int = 1,
        concurrency: int = 1,
        start_timeout: float = 120.0,
        lifetime: int | None = None,
        memory: int | None = None,
        passed: Collection[str] = (),
    ) -> None:
        """`arguments`: those of `calls.load`; `processes`: children, where the function is not async;
        `concurrency`: calls at a time in the one child of an async function; `lifetime`: calls after which a
        child is replaced; `memory` and `passed`: see `Child`."""
        self._calls = calls
        self._setup: Message = {"load": calls.load, "arguments": arguments, "serve": "calls"}
        self._setup |= {"timeout": timeout, "concurrency": concurrency}
        self._name, self._memory, self._passed = name, memory, passed
        self._timeout, self._processes, self._concurrency = timeout, processes, concurrency
        self._start_timeout, self._lifetime = start_timeout, lifetime
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._inbox: list[_PendingCall] = []
        self._waiting: deque[_PendingCall] = deque()
        self._suspects: deque[_PendingCall] = deque()
        self._workers: list[_Worker] = []
        self._next_identity = 0
        self._asynchronous = False
        # How many children may run: one, until the first has said of what kind the function is.
        self._most = 1
        self._start_seconds = 0.0
        self._failed_starts = 0
        self._next_start = 0.0
        self._start_requested = False
        self._started: Future[None] = Future()
        self._closing = False
        self._error: IsotrainError | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Wait until a first child is ready; raises what is wrong."""
        with self._lock:
            self._start_requested = True
            self._wake()
        self._started.result()

    def submit(self, items: Iterable[Item]) -> list[Future[Result]]:
        """One future for each item; they are done in any order, and a failed call is a result."""
        calls = []
        with self._lock:
            if self._error:
                raise self._error
            for item in items:
                future: Future[Result] = Future()
                calls.append(future)
                request = {"id": self._next_identity, **self._calls.write(item)}
                try:
                    line = json.dumps(request, default=_plain).encode() + b"\n"
                except (ValueError, TypeError, RecursionError) as error:
                    detail = one_line(f"cannot send the row to {self._calls.child}: {error}")
                    future.set_result(self._failed("error", detail))
                    continue
                self._inbox.append(_PendingCall(line, future, self._next_identity, time.monotonic()))
                self._next_identity += 1
            self._wake()
        return calls

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._error = self._error or self._calls.error(f"{self._name}: its processes were closed")
            thread = self._thread
            if thread is not None and thread.is_alive():
                self._wake()
        if thread is not None:
            thread.join()
        with self._lock:
            if self._wake_writer >= 0:
                os.close(self._wake_reader)
                os.close(self._wake_writer)
                self._wake_reader = self._wake_writer = -1
                self._selector.close()
                if not self._started.done():
                    self._started.set_exception(self._error)

    def _wake(self) -> None:
        if self._error is None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"{self._name} pool", daemon=True)
            self._thread.start()
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_writer, b"x")

    def _run(self) -> None:
        error = self._calls.error(f"{self._name}: its processes were closed")
        try:
            while not self._closing:
                self._dispatch()
                self._wait()
        except IsotrainError as reason:
            error = reason
        except BaseException as reason:
            error = self._calls.error(f"{self._name}: {type(reason).__name__}: {reason}")
        finally:
            self._give_up(error)

    def _give_up(self, error: IsotrainError) -> None:
        for worker in list(self._workers):
            self._remove(worker)
            self._waiting.extend(worker.calls.values())
        with self._lock:
            self._error = self._error or error
            calls = [*self._waiting, *self._suspects, *self._inbox]
            self._inbox.clear()
        for call in calls:
            call.future.set_exception(error)
        if not self._started.done():
            self._started.set_exception(error)

    def _dispatch(self) -> None:
        """Give calls to children that have room; start children while there are calls for them."""
        with self._lock:
            self._waiting.extend(self._inbox)
            self._inbox.clear()
        for worker in [worker for worker in self._workers if worker.retiring and not worker.calls]:
            self._remove(worker)
        for worker in [worker for worker in self._active() if worker.ready]:
            if self._suspects:
                # Until there are none left a child with calls in flight gets no more, so that it falls idle.
                if not worker.calls:
                    worker.alone = True
                    self._send(worker, self._suspects.popleft())
                continue
            while (
                self._waiting and len(worker.calls) < self._concurrency and not worker.alone | worker.retiring
            ):
                self._send(worker, self._waiting.popleft())
        self._grow()

    def _grow(self) -> None:
        """Start children that are due: the first, or as many as there are already."""
        if time.monotonic() < self._growth():
            return
        active = len(self._active())
        try:
            for _ in range(min(active, self._most - active, len(self._waiting)) if active else 1):
                self._add()
        except OSError as error:
            self._failed_start(str(error))

    def _growth(self) -> float:
        """When a child is due: once a call has waited for longer than a child takes to start."""
        active = self._active()
        if not active:
            needed = self._waiting or self._suspects or (self._start_requested and not self._started.done())
            due = 0.0 if needed else math.inf
        elif not self._waiting or len(active) >= self._most or not all(worker.ready for worker in active):
            due = math.inf
        else:
            due = self._waiting[0].submitted + self._start_seconds
        return max(due, self._next_start)

    def _failed_start(self, reason: str) -> None:
        """Try again after a pause; the run ends where that has not helped and there is no other child."""
        self._failed_starts += 1
        if self._failed_starts >= STARTS and not any(worker.ready for worker in self._active()):
            raise self._no_start(reason)
        self._next_start = time.monotonic() + PAUSE * self._failed_starts

    def _no_start(self, reason: str) -> IsotrainError:
        return self._calls.error(f"{self._name}: {self._calls.child} could not be started: {reason}")

    def _failed(self, failure: str, detail: str) -> Result:
        result = self._calls.read({"failure": failure, "detail": detail})
        assert result is not None
        return result

    def _active(self) -> list[_Worker]:
        return [worker for worker in self._workers if not worker.retiring]

    def _send(self, worker: _Worker, call: _PendingCall) -> None:
        grace = GRACE if self._asynchronous else 0.0
        call.deadline = time.monotonic() + self._timeout + grace
        call.begun = False
        worker.calls[call.identity] = call
        worker.served += 1
        worker.retiring = worker.served == self._lifetime
        worker.child.send(call.line)
        self._selector.modify(worker.child.socket, worker.events(), worker)

    def _add(self) -> None:
        child = Child(self._calls.child, self._setup, memory=self._memory, passed=self._passed)
        now = time.monotonic()
        worker = _Worker(child, now, now + self._start_timeout)
        self._workers.append(worker)
        self._selector.register(child.socket, worker.events(), worker)
        if child.ending is not None:
            self._selector.register(child.ending, selectors.EVENT_READ, worker)

    def _remove(self, worker: _Worker, by_itself: bool = False) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.child.socket)
        if worker.child.ending is not None:
            self._selector.unregister(worker.child.ending)
        return worker.child.end(by_itself)

    def _wait(self) -> None:
        """Sleep until something happens or a deadline passes, and act on it."""
        first = min([self._growth(), *(worker.deadline() for worker in self._workers)])
        timeout = None if first == math.inf else max(0.0, first - time.monotonic())
        changed: dict[int, _Worker] = {}
        ended: set[int] = set()
        for key, events in self._selector.select(timeout):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_reader, 1 << 16)
                continue
            worker = cast(_Worker, key.data)
            if events & selectors.EVENT_WRITE:
                worker.child.flush()
                self._selector.modify(worker.child.socket, worker.events(), worker)
            if events & selectors.EVENT_READ:
                changed[id(worker)] = worker
            if key.fd == worker.child.ending:
                ended.add(id(worker))
        for identity, worker in changed.items():
            self._listen(worker, identity in ended)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline() <= now]:
            late = f"no result after {self._timeout:g} s; its process was killed"
            self._lost(
                worker, "timeout", late if worker.ready else f"not ready after {self._start_timeout:g} s"
            )

    def _listen(self, worker: _Worker, ended: bool) -> None:
        messages, broken = worker.child.receive()
        for message in messages:
            if not worker.ready and "refused" in message:
                refusal = str(message["refused"])
                if not self._started.done():
                    raise self._calls.error(refusal)
                broken = BrokenChild(refusal)
                break
            if not self._understand(worker, message):
                broken = broken or BrokenChild(f"{self._calls.child} sent an invalid reply")
                break
        if broken or ended:
            self._lost(worker, "crash", str(broken or ""))

    def _understand(self, worker: _Worker, message: dict[str, Any]) -> bool:
        if not worker.ready:
            worker.ready = message.get("ready") is True
            if worker.ready:
                self._failed_starts = 0
                self._start_seconds = time.monotonic() - worker.born
                # One call at a time for a function that is not async: then it is clear whose failure it is.
                self._asynchronous = message.get("asynchronous") is True
                if not self._asynchronous:
                    self._concurrency, self._most = 1, self._processes
                if not self._started.done():
                    self._started.set_result(None)
            return worker.ready
        if "begun" in message:
            call = worker.calls.get(message["begun"]) if isinstance(message["begun"], int) else None
            if call is not None:
                call.begun = True
            return call is not None
        result, identity = self._calls.read(message), message.get("id")
        if result is None or not isinstance(identity, int) or identity not in worker.calls:
            return False
        call = worker.calls.pop(identity)
        worker.alone = worker.alone and bool(worker.calls)
        # A cancelled call may leave a thread that hangs, or a process: they end with the child and its group.
        worker.retiring = worker.retiring or message.get("failure") == "timeout"
        call.future.set_result(result)
        return True

    def _lost(self, worker: _Worker, failure: str, reason: str) -> None:
        """End a child that hangs or has crashed; the call that did it fails, the others are repeated."""
        how = self._remove(worker, by_itself=failure == "crash" and not reason)
        what = reason or how
        if not worker.ready:
            if not self._started.done():
                raise self._no_start(what)
            self._failed_start(what)
            return
        begun = [call for call in worker.calls.values() if call.begun]
        for call in worker.calls.values():
            # Known if it was the only call, or if it has now failed alone for the second time.
            if [call] == begun or (call.suspect and len(worker.calls) == 1):
                call.future.set_result(self._failed(failure, what))
            elif begun and not call.begun:
                self._waiting.appendleft(call)
            else:
                call.suspect = True
                self._suspects.append(call)


def _plain(value: Any) -> Any:
    """Values of data files that JSON does not know."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return str(value)
