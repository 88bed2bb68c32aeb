"""The trainer's side of environment processes: start them, talk to them within limits, end them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from isotrain.errors import EpisodeError
from isotrain.process.child import BrokenChild, Child, all_processes, kill_group, raise_file_limit

LONGEST_REPLY = 1 << 22
# Of one episode; a fork bomb has more within a second.
MOST_PROCESSES = 64
LOOK_SECONDS = 1.0
START_SECONDS = 10.0


class EpisodeFailed(Exception):
    """An episode that cannot go on; the run can."""

    def __init__(self, failure: str, detail: str) -> None:
        super().__init__(f"{failure}: {detail}")
        self.failure, self.detail = failure, detail


class EnvironmentProcess:
    """One episode's environment."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, time_limit: float
    ) -> None:
        self.pid, self._reader, self._writer, self._time_limit = pid, reader, writer, time_limit
        self.ended_for = ""
        """Why it was killed from outside."""

    async def ask(self, request: str, **values: Any) -> dict[str, Any]:
        """The reply; raises `EpisodeFailed` where there is none."""
        line = json.dumps({"request": request, **values}).encode() + b"\n"
        try:
            reply = await asyncio.wait_for(self._exchange(line), self._time_limit)
        except asyncio.TimeoutError:
            raise EpisodeFailed("timeout", f"no reply to '{request}' after {self._time_limit:g} s") from None
        except ValueError:  # longer than the reader's limit
            raise EpisodeFailed("crash", f"its reply to '{request}' is endless") from None
        except OSError:
            reply = b""
        if not reply.endswith(b"\n"):
            raise EpisodeFailed("crash", self.ended_for or f"its process ended during '{request}'")
        try:
            message = json.loads(reply)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise EpisodeFailed("crash", f"its reply to '{request}' is invalid")
        if "raised" in message:
            raise EpisodeFailed("error", str(message["raised"]))
        return message

    async def _exchange(self, line: bytes) -> bytes:
        self._writer.write(line)
        await self._writer.drain()
        return await self._reader.readline()

    def end(self) -> None:
        """With all that it started, unless that has left its group."""
        self._writer.close()
        kill_group(self.pid)


class EnvironmentProcesses:
    """Forks a process for each episode from one that has imported the user's file.

    All but `start` and `close` is called in one event loop.
    """

    def __init__(
        self,
        loaded: Mapping[str, Any],
        *,
        time_limit: float,
        start_timeout: float,
        memory: int | None = None,
        passed: Collection[str] = (),
        python: str | None = None,
    ) -> None:
        """`loaded`: the arguments of `interfaces.load`, or an environment of `verifiers` and its arguments;
        `memory`, `passed` and `python`: see `Child`."""
        self._setup = {"load": "isotrain.environments.interfaces:load", "arguments": loaded, "serve": "forks"}
        if name := loaded.get("verifiers"):
            self._setup["load"] = "isotrain.environments.verifiers_environments:load_rollouts"
            self._setup["arguments"] = {"name": name, "arguments": loaded["arguments"] or {}}
        self._field = f"rollout.{loaded['section']}"
        self._time_limit, self._start_timeout = time_limit, start_timeout
        self._memory, self._passed, self._python = memory, passed, python
        self._child: Child | None = None
        self._running: dict[int, EnvironmentProcess] = {}
        self._watching: asyncio.Task[None] | None = None
        self._forking = asyncio.Lock()
        self._closed = False
        self.known: Mapping[str, Any] = {}
        """`kind` of environment, and its `tools` as the chat template takes them."""

    def start(self) -> None:
        """Import the user's file; raises `EpisodeError` where that fails."""
        raise_file_limit()  # each episode has a socket
        self._child = Child(
            "the environment's process",
            self._setup,
            memory=self._memory,
            passed=self._passed,
            python=self._python,
        )
        try:
            reply = self._child.wait(self._start_timeout)
        except TimeoutError:
            self.close()
            raise EpisodeError(
                f"the file of {self._field} was not imported within {self._start_timeout:g} s; "
                f"raise {self._field}.start_timeout"
            ) from None
        except BrokenChild as broken:
            reply = {"refused": str(broken)} if str(broken) else {}
        if "ready" not in reply:
            self.close()
            raise EpisodeError(str(reply.get("refused", "the environment's process ended while it started")))
        self.known = reply

    async def open(self) -> EnvironmentProcess:
        """A process for one episode."""
        async with self._forking:
            try:
                ours, theirs = socket.socketpair()
            except OSError as error:
                raise EpisodeFailed("crash", f"no socket for its process: {error}") from error
            with theirs:
                pid = await asyncio.to_thread(self._fork, theirs.fileno())
        reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST_REPLY)
        process = EnvironmentProcess(pid, reader, writer, self._time_limit)
        self._running[pid] = process
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return process

    def _fork(self, descriptor: int) -> int:
        child = self._child
        try:
            if child is None:
                raise BrokenChild
            socket.send_fds(child.socket, [b"+"], [descriptor])
            pid = int(child.wait(START_SECONDS)["pid"])
        except (BrokenChild, OSError, LookupError, TypeError, ValueError, OverflowError):
            # Whatever ended it: another one is started for the next episodes.
            self._end_all()
            if not self._closed:
                self.start()
            raise EpisodeFailed("crash", "the process that starts environments has ended") from None
        if pid == 0:
            raise EpisodeFailed("crash", "the machine has no more processes for it")
        return pid

    def end(self, process: EnvironmentProcess) -> None:
        self._running.pop(process.pid, None)
        process.end()

    async def _watch(self) -> None:
        """Processes are counted from outside: limits of the system do not hold for root."""
        while self._running:
            await asyncio.sleep(LOOK_SECONDS)
            for group, count in (await asyncio.to_thread(_group_sizes)).items():
                if count > MOST_PROCESSES and (process := self._running.get(group)):
                    process.ended_for = f"it started more than {MOST_PROCESSES} processes"
                    process.end()
        self._watching = None

    def close(self) -> None:
        """End every process; may be called twice."""
        self._closed = True
        self._end_all()

    def _end_all(self) -> None:
        for process in list(self._running.values()):
            kill_group(process.pid)
        self._running.clear()
        # Two threads may be here: the one that closes, and the one that was forking.
        child, self._child = self._child, None
        if child is not None:
            child.end()


def _group_sizes() -> Counter[int]:
    sizes: Counter[int] = Counter()
    for name in all_processes():
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            sizes[int(file.read().rpartition(b")")[2].split()[2])] += 1
    return sizes
