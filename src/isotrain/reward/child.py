"""The child process that computes rewards: requests in, replies out, as lines of JSON on two pipes.

The first request is the setup, every other is `{id, response, answer, row}`. The first reply is
`{ready: true}` or `{refused: why}`. Then for each request there is `{begun: id}` and later either
`{id, score, parts}` or `{id, failure, detail}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import resource
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from isotrain.errors import IsotrainError
from isotrain.lifetime import die_with_parent
from isotrain.reward.base import one_line
from isotrain.reward.function import RewardFunction, load_function, load_plugin, read_result
from isotrain.reward.mathematics import PythonRefused, load_math
from isotrain.user_file import where

Message = dict[str, Any]
SLICES = 10


class Replies:
    """The pipe to the parent. Lines are written whole, so that no thread of the user's can split one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, message: Message) -> None:
        line = memoryview(json.dumps(message).encode() + b"\n")
        while line:
            line = line[os.write(self._descriptor, line) :]


def main(arguments: list[str]) -> None:
    requests, replies = int(arguments[0]), Replies(int(arguments[1]))
    # A process that the user's function starts must not hold the pipes open when this one is gone.
    for descriptor in map(int, arguments[:2]):
        os.set_inheritable(descriptor, False)
    die_with_parent()  # elsewhere than on Linux only the end of the pipe tells
    with os.fdopen(requests, "rb") as lines:
        _run(lines, replies)


def _run(lines: BinaryIO, replies: Replies) -> None:
    setup = json.loads(lines.readline())
    if setup["memory"]:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (setup["memory"], setup["memory"]))
    try:
        if setup["kind"] == "math":
            score = load_math()
            function = RewardFunction(score, ("response", "answer"), asynchronous=False)
        elif setup["kind"] == "plugin":
            function = load_plugin(setup["name"], setup["options"])
        else:
            function = load_function(setup["path"], setup["source"])
    except IsotrainError as error:
        replies.send({"refused": str(error)[:4000]})
        return
    replies.send({"ready": True, "asynchronous": function.asynchronous})
    if function.asynchronous:
        asyncio.run(_serve_async(function, lines, replies, setup["timeout"], setup["concurrency"]))
    else:
        _serve(function, lines, replies)


def _read(lines: BinaryIO, deliver: Callable[[Message], object]) -> None:
    """Read until the parent closes the pipe or dies; then end, with every process of this group."""
    with contextlib.suppress(Exception):
        for line in lines:
            deliver(json.loads(line))
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _serve(function: RewardFunction, lines: BinaryIO, replies: Replies) -> None:
    waiting: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, waiting.put), daemon=True).start()
    while True:
        request = waiting.get()
        replies.send({"begun": request["id"]})
        try:
            reply = _result(function.call(request["response"], request["answer"], request["row"]))
        except BaseException as error:
            reply = _failure(error)
        replies.send({"id": request["id"], **reply})


async def _serve_async(
    function: RewardFunction, lines: BinaryIO, replies: Replies, timeout: float, concurrency: int
) -> None:
    loop = asyncio.get_running_loop()
    # One thread for each call: with fewer, calls that hang in `asyncio.to_thread` would take the others'.
    loop.set_default_executor(ThreadPoolExecutor(concurrency))
    # The loop knows tasks by weak references only. One that ignores its cancellation stays here for good.
    tasks: set[asyncio.Task[Any]] = set()

    async def guarded(request: Message) -> Message:
        # Within the coroutine, so that sys.exit in one call does not end the loop and all others with it.
        try:
            return _result(await function.call(request["response"], request["answer"], request["row"]))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return _failure(error)

    async def handle(request: Message) -> None:
        replies.send({"begun": request["id"]})
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
        replies.send({"id": request["id"], **reply})

    def accept(request: Message) -> None:
        task = loop.create_task(handle(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def deliver(request: Message) -> None:
        loop.call_soon_threadsafe(accept, request)

    threading.Thread(target=_read, args=(lines, deliver), daemon=True).start()
    await asyncio.Event().wait()


def _result(returned: Any) -> Message:
    try:
        score, parts = read_result(returned)
    except ValueError as error:
        return {"failure": "error", "detail": one_line(str(error))}
    return {"score": score, "parts": parts}


def _failure(error: BaseException) -> Message:
    kind = "error" if isinstance(error, (Exception, PythonRefused)) else "crash"
    return {"failure": kind, "detail": one_line(where(error))}


if __name__ == "__main__":
    main(sys.argv[1:])
