"""The configuration that verl prints into its log before the first step."""

from __future__ import annotations

import ast
import re
from typing import Any

from isotrain.imports.source import ImportSourceError

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_WORKER = re.compile(r"^\((?:\w+ )?pid=\d+(?:, ip=[\d.]+)?\) ?|^\(\w+ pid=\d+(?:, ip=[\d.]+)?\) ?")
_TRACE = re.compile(r"^\++ ((?:\S+ )?(?:python\S*|torchrun|deepspeed|ray) .*)$")
_STEPS = re.compile(r"Total training steps: (\d{1,9})\b")
_START = re.compile(r"^\{'\w+': ?\{")
_STRING = re.compile(r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"")
_BRACKETS = re.compile(r"[{}\[\]()]")
LONGEST_CONFIG = 512 * 1024
_MOST_DEPTH = 30


def plain_lines(text: str) -> list[str]:
    """Lines without colours and without the name of the Ray worker that printed them."""
    return [_WORKER.sub("", _COLOUR.sub("", line)) for line in text.splitlines()]


def printed_config(lines: list[str]) -> tuple[dict[str, Any], int] | None:
    """The first printed configuration and its line, counted from 1.

    Each line is read once: brackets are counted line by line, and only a text whose brackets are closed is
    parsed. `pprint` indents all lines but the first: a second beginning means that the first was broken off.
    """
    taken: list[str] = []
    start = length = depth = 0
    for number, line in enumerate(lines, start=1):
        if _START.match(line):
            taken, start, length, depth = [], number, 0, 0
        elif not taken:
            continue
        taken.append(line)
        length += len(line) + 1
        if length > LONGEST_CONFIG:
            raise ImportSourceError(f"line {start}: the printed configuration has no end")
        for character in _BRACKETS.findall(_STRING.sub("", line)):
            depth += 1 if character in "{[(" else -1
            if depth > _MOST_DEPTH or depth < 0:
                break
        if depth > _MOST_DEPTH or depth <= 0:
            values = _literal("\n".join(taken)) if depth == 0 else None
            if values is not None:
                return values, start
            taken = []
    return None


def _literal(text: str) -> dict[str, Any] | None:
    try:
        values = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return values if isinstance(values, dict) and all(isinstance(key, str) for key in values) else None


def traced_command(lines: list[str]) -> tuple[str, int] | None:
    """The command that `set -x` printed, and its line."""
    for number, line in enumerate(lines, start=1):
        found = _TRACE.match(line)
        if found and ("verl." in line or "openrlhf." in line):
            return found[1], number
    return None


def total_steps(lines: list[str]) -> int | None:
    for line in lines:
        if found := _STEPS.search(line):
            return int(found[1])
    return None
