"""The child's side of a child process: loads code that we did not write, and replies to messages for it.

Its only argument is the number of a socket. Messages are lines of JSON; the first is the setup,
`{load: "module:function", arguments, memory, serve, ...}`. The function is called with the arguments, and the
reply is `{ready: true, ...}`, or `{refused: why}` with what it raised. What it returned is served as

- `calls`: a function of a request, which may be async. For each request there is `{begun: id}`, and later
  `{id, ...}` with what the function returned, or `{id, failure, detail}`. The setup has `timeout` and
  `concurrency` of async calls.
- `forks`: a function that makes an object with `answer(request, values)`, and what to add to `ready`. For
  each byte that comes with a descriptor, a process is forked, and `{pid}` replied. There, on this descriptor,
  a request is `{request: name, ...}`, and its reply `{...}` or `{raised: what}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import queue
import random
import resource
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, TextIO

from isotrain.children import die_with_parent
from isotrain.errors import IsotrainError, one_line
from isotrain.user_file import where

Message = dict[str, Any]
SLICES = 10
# Characters of one forked process: enough to see a mistake, and little enough for a log.
LONGEST_OUTPUT = 1 << 12


def main(arguments: list[str]) -> None:
    parent = socket.socket(fileno=int(arguments[0]))
    # A process that the user's code starts must not hold the socket open when this one is gone.
    parent.set_inheritable(False)
    die_with_parent()  # elsewhere than on Linux only the end of the socket tells
    lines = parent.makefile("rb")
    setup = json.loads(lines.readline())
    if setup["memory"]:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (setup["memory"], setup["memory"]))
    try:
        module, _, function = setup["load"].partition(":")
        loaded: Any = getattr(importlib.import_module(module), function)(**setup["arguments"])
    except Exception as error:
        why = str(error) if isinstance(error, IsotrainError) else where(error)
        _send(parent, {"refused": why[:4000]})
        return
    if setup["serve"] == "forks":
        lines.close()  # nothing was sent after the setup
        _serve_forks(parent, *loaded)
        return
    asynchronous = inspect.iscoroutinefunction(loaded)
    _send(parent, {"ready": True, "asynchronous": asynchronous})
    if asynchronous:
        asyncio.run(_serve_async(loaded, lines, parent, setup["timeout"], setup["concurrency"]))
    else:
        _serve(loaded, lines, parent)


def _send(connection: socket.socket, message: Message) -> None:
    """As text that all of isotrain can write: halves of surrogate pairs become question marks."""
    text = json.dumps(message, ensure_ascii=False)
    connection.sendall(text.encode("utf-8", "replace") + b"\n")


def _failure(error: BaseException) -> Message:
    return {"failure": "error" if isinstance(error, Exception) else "crash", "detail": one_line(where(error))}


def _serve(function: Callable[[Message], Message], lines: BinaryIO, parent: socket.socket) -> None:
    waiting: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, waiting.put), daemon=True).start()
    while True:
        request = waiting.get()
        _send(parent, {"begun": request["id"]})
        try:
            reply = function(request)
        except BaseException as error:
            reply = _failure(error)
        _send(parent, {"id": request["id"], **reply})


def _read(lines: BinaryIO, deliver: Callable[[Message], object]) -> None:
    """Read until the parent closes the socket or dies; then end, with every process of this group."""
    with contextlib.suppress(Exception):
        for line in lines:
            deliver(json.loads(line))
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


async def _serve_async(
    function: Callable[[Message], Awaitable[Message]],
    lines: BinaryIO,
    parent: socket.socket,
    timeout: float,
    concurrency: int,
) -> None:
    loop = asyncio.get_running_loop()
    # One thread for each call: with fewer, calls that hang in `asyncio.to_thread` would take the others'.
    loop.set_default_executor(ThreadPoolExecutor(concurrency))
    # The loop knows tasks by weak references only. One that ignores its cancellation stays here for good.
    tasks: set[asyncio.Task[Any]] = set()

    async def guarded(request: Message) -> Message:
        # Within the coroutine, so that sys.exit in one call does not end the loop and all others with it.
        try:
            return await function(request)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return _failure(error)

    async def handle(request: Message) -> None:
        _send(parent, {"begun": request["id"]})
        call = loop.create_task(guarded(request))
        tasks.add(call)
        call.add_done_callback(tasks.discard)
        # In slices: while another call blocks the loop, the time of this one does not run out.
        for _ in range(SLICES):
            if not call.done():
                await asyncio.wait({call}, timeout=timeout / SLICES)
        if not call.done():
            call.cancel()
            reply: Message = {"failure": "timeout", "detail": f"no result after {timeout:g} s"}
        elif call.cancelled():
            reply = {"failure": "error", "detail": "the call cancelled itself"}
        else:
            reply = call.result()
        _send(parent, {"id": request["id"], **reply})

    def accept(request: Message) -> None:
        task = loop.create_task(handle(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def deliver(request: Message) -> None:
        loop.call_soon_threadsafe(accept, request)

    threading.Thread(target=_read, args=(lines, deliver), daemon=True).start()
    await asyncio.Event().wait()


def _serve_forks(parent: socket.socket, factory: Callable[[], Any], known: Message) -> None:
    _send(parent, {"ready": True, **known})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forked processes need not be waited for
    while True:
        byte, descriptors, _, _ = socket.recv_fds(parent, 1, 1)
        if not byte or not descriptors:
            return
        _send(parent, {"pid": _fork(parent, descriptors[0], factory)})
        os.close(descriptors[0])


def _fork(parent: socket.socket, descriptor: int, factory: Callable[[], Any]) -> int:
    try:
        pid = os.fork()
    except OSError:
        return 0  # told as such: there is no room for another process
    if pid:
        return pid
    try:
        os.setsid()  # a group of its own, with which it is killed
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        parent.close()
        _silence()
        with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as requests:
            connection.set_inheritable(False)
            _answer(connection, requests, factory)
    finally:
        os._exit(0)


def _answer(connection: socket.socket, requests: BinaryIO, factory: Callable[[], Any]) -> None:
    answers = None
    for line in requests:
        request = json.loads(line)
        if answers is None:
            _seed(request["seed"])
        try:
            answers = answers or factory()
            reply = answers.answer(request.pop("request"), request)
        except BaseException as error:
            reply = {"raised": where(error)[:1000]}
        _send(connection, reply)


def _seed(seed: int) -> None:
    """Forked processes would all draw the same numbers, and in another run others."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def _silence() -> None:
    """Show the output of the user's code up to a limit, and nothing of processes that it starts."""
    shown = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.stdout = sys.stderr = _Limited(shown)


class _Limited:
    """A stream that shows so many characters and drops the rest."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._left = stream, LONGEST_OUTPUT

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            if self._left > 0:
                self._stream.write(text[: self._left])
        self._left -= len(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
