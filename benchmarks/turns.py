"""Two or more programs that take turns: each in a process of its own, only one working at a time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


class Turns:
    """A worker's side: it works only between the parent's `go` and its own answer."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.rows: list[dict[str, float]] = []
        self._answer(ready=True)

    def after_step(self, **metrics: float) -> None:
        """To be called after every step; answers, and waits for the next turn, after each `steps` of them."""
        self.rows.append(metrics)
        if len(self.rows) == self.steps:
            seconds = time.perf_counter() - self._started
            processor = _processor_seconds() - self._used
            rows, self.rows = self.rows, []
            self._answer(seconds=seconds, processor_s=processor, rows=rows, peak_bytes=_peak_bytes())

    def _answer(self, **fields: Any) -> None:
        print("turn " + json.dumps(fields), flush=True)
        if not sys.stdin.readline():
            sys.exit()
        self._used = _processor_seconds()
        self._started = time.perf_counter()


Measured = dict[str, list[dict[str, Any]]]
"""What each side answered, turn by turn."""


def take_turns(sides: Sequence[str], turns: int, tell: Callable[[Measured], None]) -> None:
    """Start this script once for each side with `--side NAME`, let them alternate; `tell` after each turn.

    The first turn warms caches and memory up and is left out.
    """
    processes = {
        side: subprocess.Popen(
            [sys.executable, *sys.argv, "--side", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for side in sides
    }
    results: Measured = {side: [] for side in sides}
    try:
        for process in processes.values():
            assert _read(process)["ready"]
        for turn in range(turns + 1):
            for side in sides if turn % 2 else reversed(sides):
                stdin = processes[side].stdin
                assert stdin is not None
                stdin.write("go\n")
                stdin.flush()
                results[side].append(_read(processes[side]))
            line = ", ".join(f"{side} {results[side][-1]['seconds']:.2f} s" for side in sides)
            print(f"turn {turn}: {line}", file=sys.stderr, flush=True)
            if turn:
                tell({side: told[1:] for side, told in results.items()})
    finally:
        for process in processes.values():
            _end(process)


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("turn "):
            answer: dict[str, Any] = json.loads(line.removeprefix("turn "))
            return answer
    raise SystemExit(f"a side ended early with code {process.wait()}")


def _end(process: subprocess.Popen[str]) -> None:
    """A side that waits for its turn leaves by itself, with all that it started."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _processor_seconds() -> float:
    """Of this process and all that it started and that still runs."""
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _peak_bytes() -> int:
    """Of this process and all that it started, the sum of each one's largest resident memory."""
    own = psutil.Process()
    return sum(_peak_of(process.pid) for process in [own, *own.children(recursive=True)])


def _peak_of(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
