"""The parent's side of one child process: start it, talk to it without blocking, end it with its group."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import uuid
from collections.abc import Collection
from typing import Any

from isotrain.device.variables import child_environment
from isotrain.own_python import module_command

LONGEST_REPLY = 1 << 20
_CHUNK = 1 << 16
PATIENCE = 0.5
PATIENCE_AFTER_KILL = 5.0
# In the environment of a child, and so of all that it starts, in whatever session that is.
MARK = "ISOTRAIN_REWARD_PROCESS"


class BrokenChild(Exception):
    """The child can no longer be reached. The reason is empty if it ended by itself."""


class Child:
    """A running `isotrain.reward.child` in its own session, and so in its own process group."""

    def __init__(self, setup: bytes, passed: Collection[str] = ()) -> None:
        """`passed`: variables of ours that it sees beside the harmless ones.

        Raises OSError where the system has no process or descriptor to give."""
        self._mark = uuid.uuid4().hex
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            request_end, self.requests = os.pipe()
            theirs.callback(os.close, request_end)
            ours.callback(os.close, self.requests)
            self.replies, reply_end = os.pipe()
            theirs.callback(os.close, reply_end)
            ours.callback(os.close, self.replies)
            self._process = subprocess.Popen(
                module_command("isotrain.reward.child", str(request_end), str(reply_end)),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints goes where errors go
                pass_fds=(request_end, reply_end),
                start_new_session=True,
                env={"PYTHONHASHSEED": "0", **child_environment(os.environ, passed), MARK: self._mark},
            )
            ours.pop_all()
        os.set_blocking(self.requests, False)
        os.set_blocking(self.replies, False)
        self.ending = _pidfd(self._process.pid)
        self._out = bytearray()
        self._in = bytearray()
        self.send(setup)

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
        """Write what the pipe takes now; the rest waits for the next time."""
        try:
            while self._out:
                del self._out[: os.write(self.requests, memoryview(self._out)[:_CHUNK].tobytes())]
        except BlockingIOError:
            pass
        except OSError:
            # A child that has ended is noticed by the end of its replies, which may still hold results.
            self._out.clear()

    def receive(self) -> tuple[list[dict[str, Any]], BrokenChild | None]:
        """The whole messages that are there, and the reason if there will be no more."""
        broken = None
        try:
            while chunk := os.read(self.replies, _CHUNK):
                self._in += chunk
                if len(self._in) > LONGEST_REPLY and b"\n" not in self._in:
                    broken = BrokenChild("the reward process sent an endless reply")
                    break
            else:
                broken = BrokenChild()
        except BlockingIOError:
            pass
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        messages: list[dict[str, Any]] = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                return messages, BrokenChild("the reward process sent an invalid reply")
            messages.append(message)
        return messages, broken

    def end(self, by_itself: bool = False) -> str:
        """Kill the child and all that it started; say how the child itself ended if it did so `by_itself`."""
        if by_itself and self.ending is not None:
            # Its pipes are closed a moment before it has ended, and after the kill all ends look alike.
            select.select([self.ending], [], [], PATIENCE)
        # The group keeps its number until its leader is waited for.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _kill_marked(f"{MARK}={self._mark}".encode())
        try:
            code = self._process.wait(PATIENCE_AFTER_KILL)
        except subprocess.TimeoutExpired:
            code = None  # it hangs in the kernel, such as on a network disk; it ends when that lets go
        for descriptor in (self.requests, self.replies, self.ending):
            if descriptor is not None:
                os.close(descriptor)
        if code is None:
            return "the reward process could not be killed"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the reward process ended by {signal.Signals(-code).name}"
        return f"the reward process ended with exit code {code}"


def _pidfd(pid: int) -> int | None:
    """A descriptor that is readable once the process has ended, on kernels that have it."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _kill_marked(variable: bytes) -> None:
    """End all processes that have the variable in the environment they were started with, on Linux."""
    killed: set[str] = set()
    while True:
        found = {pid for pid in _processes() - killed if variable in _environment(pid)}
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)
        killed |= found
        # Again, until there is none that another has started in the meantime.
        if not found:
            return


def _processes() -> set[str]:
    with contextlib.suppress(OSError):
        return {name for name in os.listdir("/proc") if name.isdigit()}
    return set()


def _environment(pid: str) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []
