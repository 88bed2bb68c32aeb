"""verl's metrics, from its console log or its `file` logger.

Console (0.2 to 0.8.0.dev): `step:3 - actor/pg_loss:0.1 - ...`, behind what Ray puts before it. Up to 0.4
values have three decimals, which bounds what a comparison can see; from 0.5 they are whole.
File (0.6.0 to 0.8.0.dev): `{"step": 3, "data": {"actor/pg_loss": 0.1, ...}}` a line. From 0.8 it writes NaN
as null, so a null is read as NaN: the comparison shows it instead of a gap.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotrain.errors import IsotrainError
from isotrain.language import tr
from isotrain.tools.parity.read.bounded import Source, clipped, number
from isotrain.tools.parity.read.columns import Columns, step_of
from isotrain.tools.parity.read.tables import objects, value_of
from isotrain.tools.parity.run import RunLog

COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# A configuration, and what Ray prints beside it.
_LONGEST_HEAD = 4 << 20
# At the start, or after a prefix or a progress bar that shares the line.
_STEP = re.compile(r"(?:^|(?<=[\s\])]))step:(\S{1,40}) - ")

_PLANNED = re.compile(rb"Total training steps: (\d{1,9})\s*$")


def metrics_of(line: bytes) -> tuple[str, list[str]] | None:
    """Step and `name:value` texts; None for the many lines that are something else."""
    if b"step:" not in line:
        return None
    text = COLOUR.sub("", line.decode("utf-8", errors="replace"))
    matched = _STEP.search(text)
    if not matched:
        return None
    pairs = text[matched.end() :].strip().split(" - ")
    # Text of a model may say "step:" too; metrics do not start with anything but a number.
    return (matched[1], pairs) if _pair(pairs[0]) else None


def read_verl_console(path: Path) -> RunLog:
    source = Source(path)
    columns = Columns(source, resumes=True)
    planned = None
    head = _Head()
    for line, content, ended in source.console_lines():
        if not planned and (matched := _PLANNED.search(content)):
            planned = int(matched[1])
        # The last number of a line without an end may lack digits.
        parsed = metrics_of(content) if ended else None
        if not parsed:
            head.add(content)
            continue
        head.end()
        text, pairs = parsed
        step = step_of(source, "step", text, line)
        metrics = []
        for pair in pairs:
            metric = _pair(pair)
            if metric is None:
                raise source.error(
                    f"{clipped(pair)} is not `name:number`: mend the line, if another process wrote into it",
                    line,
                )
            metrics.append(metric)
        columns.add_row(step, metrics, line)
    run = columns.run("verl console log", "no line `step:3 - name:0.5 - ...`")
    settings, notes = head.settings()
    return replace(run, planned_steps=planned, settings=settings, notes=(*run.notes, *notes))


class _Head:
    """The lines before the first step, where verl prints its configuration."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._left = _LONGEST_HEAD

    def add(self, line: bytes) -> None:
        if len(line) >= self._left:
            # Without a line in its middle, a configuration would be another one.
            return self.end()
        self._lines.append(line)
        self._left -= len(line) + 1

    def end(self) -> None:
        self._left = 0

    def settings(self) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """The recipe that the configuration comes to, and a note if it cannot be read."""
        text = b"\n".join(self._lines).decode("utf-8", errors="replace")
        # The import's tables are loaded only for a log that prints something for them.
        if "{'" not in text and "+ " not in text:
            return None, ()
        from isotrain.tools.imports.convert import recipe_of_log

        try:
            return recipe_of_log(text), ()
        except IsotrainError as error:
            reason = clipped(str(error), 200)
            return None, (tr("the printed configuration is not compared: {reason}", reason=reason),)


def _pair(text: str) -> tuple[str, float] | None:
    name, colon, value = text.rpartition(":")
    parsed = number(value) if colon else None
    return (name.strip(), parsed) if name.strip() and parsed is not None else None


def is_verl_row(row: dict[str, Any]) -> bool:
    return "step" in row and isinstance(row.get("data"), dict)


def read_verl_file(path: Path) -> RunLog:
    source = Source(path)
    columns = Columns(source, resumes=True)
    for line, row in objects(source):
        if not is_verl_row(row):
            raise source.error('no "step" and "data" in it, as the lines before have', line)
        step = step_of(source, "step", row["step"], line)
        values = {name: math.nan if value is None else value_of(value) for name, value in row["data"].items()}
        columns.add_row(step, [(name, value) for name, value in values.items() if value is not None], line)
    return columns.run("verl file log", "no line has a number")
