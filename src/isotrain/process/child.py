"""The parent's side of one child process: start it, talk to it without blocking, end all that it started.

The child runs `worker.py`, and in it code that we did not write: what it sends has limits and is checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from isotrain.children import module_arguments
from isotrain.device.vendors import child_environment

Message = dict[str, Any]
LONGEST_REPLY = 1 << 20
_CHUNK = 1 << 16
PATIENCE = 0.5
PATIENCE_AFTER_KILL = 5.0
# Begins the name of a variable of each child, and so of all that it starts, in whatever session that is. The
# name is the child's own: children of children have both.
MARK = "ISOTRAIN_CHILD_"


class BrokenChild(Exception):
    """The child can no longer be reached. The reason is empty if it ended by itself."""


class Child:
    """A running `worker.py` in its own session, and so in its own process group."""

    def __init__(
        self,
        name: str,
        setup: Mapping[str, Any],
        *,
        memory: int | None = None,
        passed: Collection[str] = (),
        python: str | None = None,
    ) -> None:
        """`name`: how errors call it; `setup`: see `worker.py`; `memory`: bytes of address space; `passed`:
        variables of ours that it sees beside the harmless ones; `python`: which one runs it, if not this.

        Raises OSError where the system has no process or descriptor to give."""
        self.name, self.mark = name, f"{MARK}{uuid.uuid4().hex}"
        with contextlib.ExitStack() as ours:
            self.socket, theirs = socket.socketpair()
            ours.enter_context(self.socket)
            with theirs:
                self._process = subprocess.Popen(
                    [
                        python or sys.executable,
                        *module_arguments("isotrain.process.worker", str(theirs.fileno())),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what the user's code prints goes where errors go
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env={"PYTHONHASHSEED": "0", **child_environment(os.environ, passed), self.mark: "1"},
                )
            ours.pop_all()
        self.socket.setblocking(False)
        self.ending = _pidfd(self.pid)
        self._out = bytearray()
        self._in = bytearray()
        self.send(json.dumps({**setup, "memory": memory}).encode() + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def wants_to_write(self) -> bool:
        return bool(self._out)

    def send(self, line: bytes) -> None:
        self._out += line
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now; the rest waits for the next time."""
        try:
            while self._out:
                del self._out[: self.socket.send(memoryview(self._out)[:_CHUNK].tobytes())]
        except BlockingIOError:
            pass
        except OSError:
            # A child that has ended is noticed by the end of its replies, which may still hold results.
            self._out.clear()

    def receive(self) -> tuple[list[Message], BrokenChild | None]:
        """The whole messages that are there, and the reason if there will be no more."""
        broken = None
        try:
            while chunk := self.socket.recv(_CHUNK):
                self._in += chunk
                if len(self._in) > LONGEST_REPLY and b"\n" not in self._in:
                    broken = BrokenChild(f"{self.name} sent an endless reply")
                    break
            else:
                broken = BrokenChild()
        except BlockingIOError:
            pass
        except OSError:  # it ended before it had read all that was sent
            broken = BrokenChild()
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        messages: list[Message] = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                return messages, BrokenChild(f"{self.name} sent an invalid reply")
            messages.append(message)
        return messages, broken

    def wait(self, seconds: float) -> Message:
        """The next message of a child that sends one at a time.

        Raises TimeoutError where none comes in time, and `BrokenChild` where none will."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        while True:
            messages, broken = self.receive()
            if messages:
                return messages[0]
            if broken:
                raise broken
            poll.register(self.socket, select.POLLIN | (select.POLLOUT if self._out else 0))
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            self.flush()

    def end(self, by_itself: bool = False) -> str:
        """Kill the child and all that it started; say how the child itself ended if it did so `by_itself`."""
        if by_itself and self.ending is not None:
            # Its socket is closed a moment before it has ended, and after the kill all ends look alike.
            poll = select.poll()
            poll.register(self.ending, select.POLLIN)
            poll.poll(PATIENCE * 1000)
        # The group keeps its number until its leader is waited for.
        kill_group(self.pid)
        _kill_marked(f"{self.mark}=1")
        try:
            code = self._process.wait(PATIENCE_AFTER_KILL)
        except subprocess.TimeoutExpired:
            code = None  # it hangs in the kernel, such as on a network disk; it ends when that lets go
        self.socket.close()
        ending, self.ending = self.ending, None
        if ending is not None:
            os.close(ending)
        if code is None:
            return f"{self.name} could not be killed"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"{self.name} ended by {signal.Signals(-code).name}"
        return f"{self.name} ended with exit code {code}"


def _pidfd(pid: int) -> int | None:
    """A descriptor that is readable once the process has ended, on kernels that have it."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _kill_marked(variable: str) -> None:
    killed: set[int] = set()
    # Again, until there is none that another has started in the meantime.
    while marked := marked_processes(variable) - killed:
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= marked


def marked_processes(variable: str) -> set[int]:
    """Processes that were started with `NAME=value` in their environment, on Linux."""
    marked = set()
    for pid in all_processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if variable.encode() in file.read().split(b"\0"):
                marked.add(pid)
    return marked


def all_processes() -> list[int]:
    """The processes of this machine, on Linux."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


def raise_file_limit() -> None:
    """Allow this process as many open files, and so sockets, as the system lets it: by default, 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
