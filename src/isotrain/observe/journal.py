"""What a run says and how far it is, in its own directory: for `isotrain runs` and `isotrain logs`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from isotrain.files import open_own
from isotrain.observe.console import Console, LineConsole
from isotrain.observe.run_directory import RunDirectory

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
            told = f"{type(error).__name__}: {error}".rstrip(": ")
            self._status["error"] = told[:2000]
            self._lines.message(f"{state}: {told}")
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
