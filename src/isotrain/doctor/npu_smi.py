"""Reads the tables that `npu-smi info` prints."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Npu:
    """One device that a process can use: a module of an A2, or one die of an A3."""

    module: int
    chip: int
    number: int
    """What masks count in: the physical number on an A3, else the module."""
    name: str
    health: str


def parse_devices(text: str) -> list[Npu]:
    """The devices of the table. Columns widen from release to release, so it is read cell by cell.

    Each device has two lines: module and name, health, power; then chip (and physical number), bus, memory.
    """
    devices: list[Npu] = []
    above: tuple[int, str, str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3:
            above = None
            continue
        first = cells[0].split()
        if len(first) == 2 and is_number(first[0]) and not re.search(r"[0-9a-fA-F]{4}:", cells[1]):
            above = (int(first[0]), first[1], cells[1])
        elif above is not None and first and all(is_number(part) for part in first):
            module, name, health = above
            number = int(first[1]) if len(first) > 1 else module
            devices.append(Npu(module, int(first[0]), number, name, health))
            above = None
    return devices


def is_number(text: str) -> bool:
    """Plain digits of a bounded length: `isdigit` also takes exponents, and `int` refuses very long ones."""
    return re.fullmatch("[0-9]{1,9}", text) is not None


def parse_driver(text: str) -> str | None:
    """The driver's version in the table's head."""
    found = re.search(r"\bVersion:\s*([\w.\-]+)", text)
    return found[1] if found else None


def parse_processes(text: str) -> list[tuple[int, int]]:
    """Module and process id of everything that holds a device."""
    _, _, table = text.partition("Process id")
    rows = re.findall(r"^\|\s*([0-9]{1,9})\s+[0-9]+\s*\|\s*([0-9]{1,9})\s*\|", table, re.MULTILINE)
    return [(int(module), int(process)) for module, process in rows]
