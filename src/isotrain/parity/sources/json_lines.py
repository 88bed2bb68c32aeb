"""JSONL of any origin: one object a line, whose numbers are metrics and whose `step` says when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isotrain.files import parse_json
from isotrain.parity.run import Run
from isotrain.parity.sources.bounded import Source, clipped
from isotrain.parity.sources.columns import MAX_METRICS, Columns, step_of
from isotrain.parity.sources.tracker_export import BOOKKEEPING

STEP_NAMES = ("step", "global_step", "_step")
# JSON has no word for these; writers that keep to the standard use strings.
NON_FINITE = {"nan", "inf", "-inf", "+inf", "infinity", "-infinity", "+infinity"}


def objects(source: Source) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line; a torn last line of a live run is left out."""
    for number, line, ended in source.lines():
        if not line.strip():
            continue
        try:
            row = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except ValueError as error:
            if not ended:
                return
            raise source.error(f"not JSON ({clipped(str(error))})", number) from error
        if not isinstance(row, dict):
            raise source.error("not a JSON object", number)
        yield number, row


def step_name(names: list[str]) -> str | None:
    """The column that counts steps, if there is one."""
    folded = {name.strip().lower(): name for name in reversed(names)}
    return next((folded[name] for name in STEP_NAMES if name in folded), None)


def value_of(value: object) -> float | None:
    """A number of JSON, None for anything else."""
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, str) and value.lower() in NON_FINITE:
        return float(value)
    return None


def read_json_lines(path: Path) -> Run:
    source = Source(path)
    columns = Columns(source, resumes=True)
    text: dict[str, int] = {}
    step_key: str | None = None
    for line, row in objects(source):
        if step_key is None:
            step_key = step_name(list(row))
            if step_key is None:
                raise source.error(f"no {', '.join(STEP_NAMES[:-1])} or {STEP_NAMES[-1]} in it", line)
        step = step_of(source, step_key, row.get(step_key), line)
        metrics = []
        for name, value in row.items():
            if name == step_key or value is None or name in BOOKKEEPING:
                continue
            # Integers, and words for what is not finite, too; lists, objects and text are no metrics.
            found = value if type(value) is float else value_of(value)
            if found is not None:
                metrics.append((name, found))
            elif isinstance(value, int):
                raise source.error(f"{clipped(name)} is too large for a number", line)
            elif name in text or len(text) < MAX_METRICS:
                text.setdefault(name, line)
            else:
                raise source.error(f"more than {MAX_METRICS} names: is this a log of metrics?", line)
        columns.add_row(step, metrics, line)
    for name, line in text.items():
        if name in columns:
            raise source.error(f"{clipped(name)} is no number here, but is one elsewhere", line)
    return columns.run("JSONL", "no line has a step and a number")
