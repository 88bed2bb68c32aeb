"""Cores to which workers of one machine have bound themselves, as some engines do; Linux.

Two on the same cores wait for each other, and nothing else says why they are slow.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

WORKERS, MACHINES = " | ", "; "


def bound_cores(before: set[int]) -> set[int]:
    """Cores of this process and its children, as far as they no longer have those of `before`."""
    cores: set[int] = set()
    for process in _tree(os.getpid()):
        with contextlib.suppress(OSError):  # it has just ended
            if (now := os.sched_getaffinity(process)) != before:
                cores |= now
    return cores


def _tree(process: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            children += map(int, file.read_text().split())
    return [process, *(below for child in children for below in _tree(child))]


def core_list(cores: set[int]) -> str:
    """As Linux writes them: `0-3,8`."""
    starts = [core for core in sorted(cores) if core - 1 not in cores]
    ends = [core for core in sorted(cores) if core + 1 not in cores]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def parse_cores(text: str) -> set[int]:
    bounds = [part.partition("-") for part in text.split(",") if part]
    return {core for first, _, last in bounds for core in range(int(first), int(last or first) + 1)}


def cores_by_machine(cores: Sequence[str], machines: Sequence[str]) -> str:
    """One text for all workers, machine by machine; empty where none is bound."""
    by_machine: dict[str, list[str]] = {}
    for text, machine in zip(cores, machines, strict=True):
        by_machine.setdefault(machine, []).append(text or "any")
    return MACHINES.join(map(WORKERS.join, by_machine.values())) if any(cores) else ""


def shared_cores(settings: Mapping[str, str]) -> str:
    """Cores that two workers of a machine are bound to, by `cores_by_machine`; empty where there are none."""
    for machine in settings.get("cores", "").split(MACHINES):
        bound = [parse_cores(text) for text in machine.split(WORKERS) if text not in ("", "any")]
        for one, other in combinations(bound, 2):
            if one & other:
                return core_list(one & other)
    return ""
