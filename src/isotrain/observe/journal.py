"""Log and status of a run in its directory, and runs listed by them: `isotrain runs`, `isotrain logs`."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.files import open_own, open_regular, parse_json, read_regular
from isotrain.observe.console import Console, LineConsole, describe, describe_validation
from isotrain.observe.run_directory import LARGEST_JSON, RunDirectory

# A status is a file on what may be a slow network drive.
SECONDS_BETWEEN_STATES = 1.0


class Journal(Console):
    """A console that also keeps a log and a status; what cannot be written costs no training."""

    def __init__(
        self,
        shown: Console,
        run: RunDirectory,
        *,
        devices: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._shown, self._run, self._clock = shown, run, clock
        self._lines = LineConsole(_Log(run.log, clock), devices=devices)  # type: ignore[arg-type]
        self._status: dict[str, Any] = {"state": "starting", "step": 0, "steps": 0, "waiting": ""}
        self._written = 0.0
        self._write()

    def start(self, total_steps: int, first_step: int) -> None:
        self._status |= {"state": "running", "step": first_step - 1, "steps": total_steps}
        self._write()
        self._lines.start(total_steps, first_step)
        self._shown.start(total_steps, first_step)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        self._status |= {"step": step, "waiting": ""}
        self._write_now_and_then()
        self._lines.update(step, values)
        self._shown.update(step, values)

    def waiting(self, text: str) -> None:
        self._status["waiting"] = text
        self._write_now_and_then()
        self._lines.waiting(text)
        self._shown.waiting(text)

    def message(self, text: str) -> None:
        self._lines.message(text)
        self._shown.message(text)

    def ended(self, error: BaseException | None) -> None:
        if error is None:
            state = "finished" if self._status["step"] >= self._status["steps"] else "stopped"
        else:
            state = "failed" if isinstance(error, Exception) else "stopped"
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            self._status["error"] = reason[:2000]
            self._lines.message(f"{state}: {reason}")
        self._status |= {"state": state, "waiting": ""}
        self._write()

    def _write_now_and_then(self) -> None:
        if self._clock() - self._written >= SECONDS_BETWEEN_STATES:
            self._write()

    def _write(self) -> None:
        self._written = self._clock()
        place = {"time": self._written, "host": socket.gethostname(), "process": os.getpid()}
        temporary = self._run.status.with_name(f".{self._run.status.name}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            with open_own(temporary, "wb") as file:
                file.write(json.dumps({**self._status, **place}).encode() + b"\n")
            os.replace(temporary, self._run.status)


class _Log(io.TextIOBase):
    """A file that lines with their time are added to; it is opened for each, so that it can be moved away."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock

    def write(self, text: str) -> int:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._clock()))
        lines = "".join(f"{stamp} {line}\n" for line in text.splitlines())
        with contextlib.suppress(OSError), open_own(self._path, "ab") as file:
            file.write(lines.encode("utf-8", "replace"))
        return len(text)


# How far below the given directory runs are looked for, and in how many directories.
DEPTH = 3
MOST_DIRECTORIES = 10_000
# A run on another machine, whose lock cannot be seen from here, is believed for so long.
SECONDS_BELIEVED = 120.0
# Bytes at the end of a file: the last row of metrics is in them.
TAIL = 1 << 16


@dataclass(frozen=True)
class RunStatus:
    path: Path
    name: str
    algorithm: str
    state: str
    """starting, running, finished, stopped, failed; killed if it ended without a word; ended if it is of a
    version that did not say how."""
    step: int
    steps: int | None
    metrics: str
    waiting: str
    """Reason why the current step waits, or why the run failed."""
    seconds: float | None
    """Since its last sign."""


def find_runs(root: Path) -> list[RunStatus]:
    """All runs in a directory and below, the newest sign first."""
    states = [state_of(path) for path in _directories(root)]
    return sorted(states, key=lambda run: (run.seconds is None, run.seconds, str(run.path)))


def _directories(root: Path) -> Iterator[Path]:
    waiting, seen = [(root, 0)], 0
    while waiting and seen < MOST_DIRECTORIES:
        path, depth = waiting.pop()
        seen += 1
        if (path / "resolved.json").is_file():
            yield path
            continue
        if depth < DEPTH:
            try:
                entries = sorted(path.iterdir(), reverse=True)
            except OSError:
                continue
            inner = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
            waiting += [(entry, depth + 1) for entry in inner if not entry.name.startswith(".")]


def state_of(path: Path, now: float | None = None) -> RunStatus:
    run = RunDirectory(path)
    now = time.time() if now is None else now
    resolved, status, row = _object(run.resolved), _object(run.status), _last_row(run.metrics)
    step, steps = _whole(status.get("step")), _whole(status.get("steps"))
    step = max(step or 0, _whole(row.get("step")) or 0)
    signs = [_modified(run.metrics), _modified(run.status), _modified(run.environment)]
    seconds = min((now - sign for sign in signs if sign is not None), default=None)
    return RunStatus(
        path=path,
        name=str(resolved.get("name", path.name)),
        algorithm=str(_section(resolved, "algorithm").get("name", "?")),
        state=_state(run, status, seconds),
        step=step,
        steps=steps,
        metrics="  ".join([*describe(row), *describe_validation(row)][:5]),
        waiting=str(status.get("waiting") or status.get("error") or "").partition("\n")[0],
        seconds=None if seconds is None else max(0.0, seconds),
    )


def _state(run: RunDirectory, status: Mapping[str, Any], seconds: float | None) -> str:
    said = str(status.get("state", ""))
    if _is_locked(run.lock):
        started = _modified(run.environment) or 0.0
        if said in ("starting", "running") and (_number(status.get("time")) or 0.0) >= started - 1:
            return said
        return "running" if (_modified(run.metrics) or 0.0) > started + 1 else "starting"
    if said not in ("starting", "running"):
        return said or "ended"
    elsewhere = status.get("host") != socket.gethostname()
    return said if elsewhere and seconds is not None and seconds < SECONDS_BELIEVED else "killed"


def _is_locked(path: Path) -> bool:
    """Whether a job trains in this directory, see `run_lock`."""
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _object(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_regular(path, LARGEST_JSON))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = content.get(name)
    return inner if isinstance(inner, dict) else {}


def _last_row(path: Path) -> dict[str, float]:
    """Metrics of the newest step; a validation after it is added."""
    rows: list[dict[str, float]] = []
    for line in tail(path).splitlines():
        try:
            row = parse_json(line)
        except ValueError:
            continue  # the first line of the tail, or one that is being written
        if isinstance(row, dict):
            rows.append({name: value for name, value in row.items() if _number(value) is not None})
    merged: dict[str, float] = {}
    for row in rows:
        merged = {**merged, **row} if row.get("step") == merged.get("step") else row
    return merged


def tail(path: Path) -> str:
    """The last part of a file."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read(TAIL).decode("utf-8", "replace")
    except OSError:
        return ""


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _number(value: Any) -> float | None:
    """A number that can be computed with; a file from elsewhere may hold anything."""
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and math.isfinite(number) else None
