"""What `chaos.py` checks after a run: its responses, its metrics, and what it left behind."""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos_faults import Processes

from isotrain.data.record import read_step
from isotrain.observe.metrics import read_metrics
from isotrain.weights.file import PREFIX

# Metrics that depend on the clock or the allocator; all others must be the same in every rerun.
VOLATILE = ("timing_s/", "perf/")
TEMPORARY = ("isotrain-*", "iso-ray-*")
# Ray's own small processes end by themselves, about a minute after a run that was killed.
AGENTS_SECONDS = 90.0


def responses(output: Path, steps: int, batch: int, n: int, staleness: int) -> dict[str, int]:
    """Those that were learnt from, against those that should have been: each draw's, once, in its step."""
    lost = doubled = elsewhere = 0
    for step in range(1, steps + 1):
        found = Counter((t.prompt_index, t.sample) for t, _, _ in read_step(output / "trajectories", step))
        first = (step - 1) * batch
        wanted = {(first + i, sample) for i in range(batch) for sample in range(n)}
        lost += len(wanted - set(found))
        elsewhere += len(set(found) - wanted)
        doubled += sum(count - 1 for count in found.values())
    rows = read_metrics(output / "metrics.jsonl")
    numbers = [int(row["step"]) for row in rows]
    lost += len(set(range(1, steps + 1)) - set(numbers))
    doubled += len(numbers) - len(set(numbers)) + elsewhere
    too_old = sum(row["rollout/staleness/max"] > staleness for row in rows)
    return {
        "steps": steps,
        "expected": steps * batch * n,
        "lost": lost,
        "doubled": doubled,
        "too_old": too_old,
    }


def compare(wild: Path, calm: Path, steps: int) -> dict[str, Any]:
    """Every metric of every step but times, bit for bit."""
    rows = [read_metrics(run / "metrics.jsonl")[:steps] for run in (wild, calm)]
    compared, different, first = 0, 0, None
    largest: dict[str, float] = {}
    for ours, theirs in zip(*rows, strict=True):
        for name in ours.keys() | theirs.keys():
            if name.startswith(VOLATILE):
                continue
            compared += 1
            a, b = ours.get(name, float("nan")), theirs.get(name, float("nan"))
            if a != b:
                different += 1
                first = first or int(ours["step"])
                largest[name] = max(largest.get(name, 0.0), abs(a - b))
    return {"compared": compared, "different": different, "first_step": first, "largest": largest}


def abandoned() -> set[str]:
    """Directories in shared memory whose process is gone: it would hold a lock on them."""
    found = set()
    for path in Path("/dev/shm").glob(PREFIX + "*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.add(path.name)
            finally:
                os.close(descriptor)
    return found


def left_over(processes: Processes, temporary: Path, shared_before: set[str]) -> dict[str, list[str]]:
    """What outlives the run. Ray's agents get the time that they need to notice."""
    deadline = time.monotonic() + AGENTS_SECONDS
    while processes.all() and time.monotonic() < deadline:
        time.sleep(0.5)
    return {
        "processes": processes.describe(),
        "shared_memory": sorted(abandoned() - shared_before),
        "directories": sorted(path.name for pattern in TEMPORARY for path in temporary.glob(pattern)),
    }


def table(figures: dict[str, Any]) -> str:
    """For people."""
    lines = ["| fault | number | recovery, s: median | max |", "|---|---|---|---|"]
    for kind, told in figures["kinds"].items():
        seconds = told["recovery_s"] or {"median": float("nan"), "max": float("nan")}
        lines.append(f"| {kind} | {told['faults']} | {seconds['median']:.1f} | {seconds['max']:.1f} |")
    learnt, same, left = figures["responses"], figures["metrics"], figures["left"]
    equal = f"{same['compared']}, {same['different']} different" if same else "not compared"
    again = ", ".join(f"{count} after {kind}" for kind, count in figures["started_again"].items())
    rows = {
        "faults": f"{figures['faults']}, {figures['while_recovering']} of them while recovering",
        "steps": figures["steps"],
        "restarts by `--restarts`": figures["restarts"],
        "started again by hand": again or 0,
        "replaced workers": figures["replaced_workers"],
        "hangs": len(figures["hangs"]),
        "ends with an error": len(figures["failures"]),
        "responses": f"{learnt['expected']}, {learnt['lost']} lost, {learnt['doubled']} doubled",
        "metrics": equal,
        "left: processes, shared memory, directories": ", ".join(str(len(one)) for one in left.values()),
    }
    lines += ["", "| what | result |", "|---|---|"]
    return "\n".join(lines + [f"| {what} | {result} |" for what, result in rows.items()])
