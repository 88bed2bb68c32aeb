"""Faults of a training run that `chaos.py` makes: who is hit, with what, and what undoes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PAGE = 4096
ENDING = ("rank", "controller", "raylet", "gcs_server", "preemption")
"""Faults that end training, which must start again."""
WORKERS = ("RolloutWorker", "RewardWorker", "PromptQueue", "PolicyRank")


class Processes:
    """All processes of a run: those that inherited a variable, and all in their sessions.

    Not by their parents, who may be dead; and some of Ray's processes write a title over their environment.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark.encode()
        self._sessions: set[int] = set()

    def all(self) -> list[psutil.Process]:
        sessions, found = dict[psutil.Process, int](), set[psutil.Process]()
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                sessions[process] = os.getsid(process.pid)
                if self._mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.add(process)
        self._sessions |= {sessions[process] for process in found}
        return [process for process, session in sessions.items() if session in self._sessions]

    def workers(self, *kinds: str) -> list[psutil.Process]:
        """Ray writes the class, and the method that runs, over the command line of a worker."""
        starts = tuple(f"ray::{kind}" for kind in kinds)
        return [process for process in self.all() if _command(process).startswith(starts)]

    def named(self, name: str) -> list[psutil.Process]:
        return [process for process in self.all() if _command(process).rpartition("/")[2] == name]

    def children(self, kind: str) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for worker in self.workers(kind):
            with suppress(psutil.Error):
                found += worker.children(recursive=True)
        return found

    def describe(self) -> list[str]:
        lines = []
        for process in self.all():
            with suppress(psutil.Error, OSError):
                where = Path(f"/proc/{process.pid}/wchan").read_text()
                lines.append(f"{process.pid} {process.status()} {where} {' '.join(process.cmdline())[:100]}")
        return lines

    def kill_all(self) -> None:
        for process in self.all():
            with suppress(psutil.Error):
                process.kill()


def _command(process: psutil.Process) -> str:
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return ""
    return words[0] if words else ""


class SmallDisk:
    """A file system of its own for the run's output, which can be filled."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        path.mkdir()
        line = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
        self.complaint = ""
        try:
            done = subprocess.run(line, capture_output=True, text=True)
            self.complaint = done.stderr.strip() if done.returncode else ""
        except OSError as error:
            self.complaint = str(error)

    def fill(self) -> Callable[[], None]:
        """Take all the room; returns what gives it back."""
        filler = self.path / "filler"
        with suppress(OSError), open(filler, "ab", buffering=0) as file:
            while True:
                file.write(b"x" * PAGE)
        return lambda: filler.unlink(missing_ok=True)

    def close(self) -> None:
        if not self.complaint:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)


@dataclass
class Fault:
    """One that was made."""

    kind: str
    victim: str
    step: int
    """The newest step in the metrics at that moment."""
    time: float
    undo: Callable[[], None] = lambda: None
    undo_at: float | None = None
    alone: bool = True
    """Whether the run had recovered from the one before."""
    starts: int = 0
    """Of training, before it."""
    recovery: float | None = None


@dataclass
class Faults:
    """Makes them; `group` is the process group that a scheduler knows, `controller` the supervised child."""

    processes: Processes
    disk: SmallDisk
    stop_seconds: float
    long_stop_seconds: float
    draw: random.Random
    deck: list[str] = field(default_factory=list)
    stops: int = 0

    def kinds(self) -> Sequence[str]:
        killed = ["engine", "reward worker", "reward process", "rank", "controller", "raylet", "gcs_server"]
        if self.processes.workers("PromptQueue"):
            killed.append("prompt queue")
        if self.processes.children("RolloutWorker"):
            killed.append("engine's child")
        disk = [] if self.disk.complaint else ["full disk"]
        return [*killed, "stopped worker", "preemption", *disk]

    def next_kind(self, supervisor: int) -> str | None:
        """As often each, in random order; None if no kind has a victim now."""
        if not any(self.victims(kind, supervisor) for kind in self.deck):
            self.deck += self.draw.sample(kinds := list(self.kinds()), len(kinds))
        kind = next((kind for kind in self.deck if self.victims(kind, supervisor)), None)
        if kind is not None:
            self.deck.remove(kind)
        return kind

    def victims(self, kind: str, supervisor: int) -> list[psutil.Process]:
        """Those that a fault of this kind could hit at this moment."""
        processes = self.processes
        with suppress(psutil.NoSuchProcess):
            if kind in ("raylet", "gcs_server"):
                return processes.named(kind)
            if kind == "controller":
                return list(psutil.Process(supervisor).children())
            if kind in ("preemption", "full disk"):
                return [psutil.Process(supervisor)]
            if kind in ("reward process", "engine's child"):
                return processes.children("RewardWorker" if kind == "reward process" else "RolloutWorker")
            of = {"engine": WORKERS[0], "reward worker": WORKERS[1], "prompt queue": WORKERS[2]}
            kinds = WORKERS if kind == "stopped worker" else (of.get(kind, WORKERS[3]),)
            return processes.workers(*kinds)
        return []

    def make(self, kind: str, supervisor: int, step: int) -> Fault | None:
        """None if its victim is gone."""
        if not (victims := self.victims(kind, supervisor)):
            return None
        victim = self.draw.choice(sorted(victims, key=lambda process: process.pid))
        try:
            fault = Fault(kind, _command(victim)[:60], step, time.monotonic())
            if kind == "preemption":
                os.killpg(supervisor, signal.SIGTERM)
            elif kind == "full disk":
                fault.undo = self.disk.fill()
            elif kind == "stopped worker":
                victim.suspend()
                fault.undo = lambda: _resume(victim)
            else:
                victim.kill()
        except (psutil.NoSuchProcess, ProcessLookupError):
            return None
        if kind in ("stopped worker", "full disk"):
            fault.undo_at = fault.time + self._seconds(kind)
        return fault

    def _seconds(self, kind: str) -> float:
        """Every fourth worker is stopped for long, the first one among them."""
        self.stops += kind == "stopped worker"
        long = kind == "stopped worker" and self.stops % 4 == 1
        return self.long_stop_seconds if long else self.stop_seconds


def _resume(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()
