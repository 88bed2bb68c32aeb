"""Limits and outcome of a program; bubblewrap watched: output read, limits kept, everything ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event
from typing import Any, Literal

from isotrain.errors import SandboxError

Ending = Literal["exit", "time", "memory", "output"]
MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of one program with everything that it starts."""

    seconds: float = 10.0
    """Wall-clock time, including the start of the sandbox."""
    memory: int = 1 << 30
    """Bytes: of address space for each process, and of memory for all of them together."""
    processes: int = 16
    """Processes and threads."""
    output: int = MIB
    """Bytes on stdout, and as many on stderr."""
    disk: int = 64 * MIB
    """Bytes in all files in /tmp together."""
    open_files: int = 64
    """Descriptors of one process."""


@dataclass(frozen=True)
class ProgramOutcome:
    ended: Ending
    """`exit`: by itself; otherwise the limit at which it was killed, or `memory` after a MemoryError."""
    exit_code: int | None
    """128 + n after signal n; None where it was killed for a limit."""
    stdout: str
    stderr: str
    seconds: float

    @property
    def succeeded(self) -> bool:
        return self.ended == "exit" and self.exit_code == 0


# How often memory is measured and `closing` is looked at. Most programs end before the first time.
INTERVAL = 0.1
# For the kernel to end what was killed.
PATIENCE = 10.0
_CHUNK = 1 << 16
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


def ended_by_memory(exit_code: int | None, stderr: str) -> bool:
    """Whether Python was refused memory and did not handle it: the kernel itself says nothing."""
    return bool(exit_code) and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError")


def supervise(
    process: subprocess.Popen[bytes],
    pipes: tuple[int, int, int],
    limits: Limits,
    closing: Event,
    seconds: float,
) -> ProgramOutcome:
    """Wait for bubblewrap's end, or bring it about after `seconds`, at a limit or once `closing` is set.

    `pipes`: of stdout, stderr and `--json-status-fd`."""
    try:
        return _Supervised(process, pipes, limits, closing).outcome(seconds)
    finally:
        if process.poll() is None:  # it could not even be watched
            process.kill()
            process.wait(PATIENCE)


class _Supervised:
    def __init__(
        self, process: subprocess.Popen[bytes], pipes: tuple[int, int, int], limits: Limits, closing: Event
    ) -> None:
        self._process, self._limits, self._closing = process, limits, closing
        self._stdout, self._stderr, self._status = pipes
        self._read = {pipe: bytearray() for pipe in pipes}
        self._selector = selectors.DefaultSelector()
        self._ending = os.pidfd_open(process.pid)
        self._init: int | None = None
        self._init_pid: int | None = None

    def outcome(self, seconds: float) -> ProgramOutcome:
        begun = time.monotonic()
        try:
            for pipe in self._read:
                os.set_blocking(pipe, False)
                self._selector.register(pipe, selectors.EVENT_READ)
            self._selector.register(self._ending, selectors.EVENT_READ)
            limit = self._watch(begun + seconds)
            self._end()
            for pipe in self._read:
                self._take(pipe)
        finally:
            self._end()
            self._selector.close()
            for descriptor in (self._ending, self._init):
                if descriptor is not None:
                    os.close(descriptor)
        return self._tell(limit or self._too_much(), time.monotonic() - begun)

    def _tell(self, limit: Ending | None, seconds: float) -> ProgramOutcome:
        most = self._limits.output
        stdout, stderr = (
            bytes(self._read[pipe][:most]).decode("utf-8", "replace") for pipe in (self._stdout, self._stderr)
        )
        if limit is not None:
            return ProgramOutcome(limit, None, stdout, stderr, seconds)
        if self._closing.is_set():
            raise SandboxError("the sandbox was closed while a program ran in it")
        code = self._reported().get("exit-code")
        if not isinstance(code, int):
            # bubblewrap reports a code only of a program that it could start.
            raise SandboxError(f"bubblewrap failed: {_last_line(stderr) or f'{self._process.returncode}'}")
        if code == 128 + signal.SIGXCPU:
            return ProgramOutcome("time", None, stdout, stderr, seconds)
        ended: Ending = "memory" if ended_by_memory(code, stderr) else "exit"
        return ProgramOutcome(ended, code, stdout, stderr, seconds)

    def _watch(self, deadline: float) -> Ending | None:
        """Read until bubblewrap ends; otherwise the limit that the program has reached."""
        measured = time.monotonic()
        while not self._closing.is_set():
            now = time.monotonic()
            if now >= deadline:
                return "time"
            if now - measured >= INTERVAL:
                if self._memory() > self._limits.memory:
                    return "memory"
                measured = time.monotonic()
            for key, _ in self._selector.select(min(INTERVAL, deadline - now)):
                if key.fd == self._ending:
                    return None
                if not self._take(key.fd):
                    self._selector.unregister(key.fd)
                if self._too_much():
                    return "output"
        return None

    def _too_much(self) -> Ending | None:
        most = self._limits.output
        return "output" if max(len(self._read[p]) for p in (self._stdout, self._stderr)) > most else None

    def _take(self, pipe: int) -> bool:
        """Read what is there, up to just beyond the limit; False after the pipe's end."""
        kept = self._read[pipe]
        with contextlib.suppress(BlockingIOError):
            while len(kept) <= self._limits.output:
                chunk = os.read(pipe, _CHUNK)
                if not chunk:
                    return False
                kept += chunk
                if pipe == self._status:
                    self._find_init()
        return True

    def _reported(self) -> dict[str, Any]:
        """Bubblewrap's messages so far, one JSON object a line."""
        report: dict[str, Any] = {}
        for line in bytes(self._read[self._status]).split(b"\n"):
            with contextlib.suppress(ValueError):
                report.update(json.loads(line))
        return report

    def _find_init(self) -> None:
        """Hold on to the first process of the program's PID namespace: all others end with it."""
        pid = self._reported().get("child-pid")
        if self._init is None and isinstance(pid, int):
            with contextlib.suppress(ProcessLookupError):
                self._init, self._init_pid = os.pidfd_open(pid), pid

    def _end(self) -> None:
        """Kill the namespace and wait until the kernel has ended all of its processes."""
        if self._init is None:
            self._take(self._status)
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
        else:
            self._process.kill()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        # The first process of a namespace ends after all others. Without it bubblewrap had not come so far.
        if self._init is not None and not _readable(self._init, PATIENCE):
            raise SandboxError(f"processes of a program could not be ended within {PATIENCE:g} s")

    def _memory(self) -> int:
        """Bytes that all processes of the program have, shared pages counted once."""
        return sum(map(_memory_of, _descendants(self._init_pid))) if self._init_pid is not None else 0


def _memory_of(pid: int) -> int:
    """Bytes of a process; 0 if it has ended.

    Root without CAP_SYS_PTRACE, as in a container, may not read smaps_rollup of another user's process.
    Anyone may read statm, which counts a shared page for every process that has it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            if proportional := _PSS.search(file.read()):
                return int(proportional[1]) * 1024
    except OSError:
        pass
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _descendants(pid: int) -> Iterator[int]:
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        yield pid
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                    waiting += map(int, file.read().split())


def _readable(descriptor: int, seconds: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
