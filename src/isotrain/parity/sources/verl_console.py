"""verl's console log (0.2 to 0.8.0.dev): `step:3 - actor/pg_loss:0.1 - ...`, behind what Ray puts before it.

Up to 0.4 values have three decimals, which bounds what a comparison can see; from 0.5 they are whole.
"""

from __future__ import annotations

import re
from pathlib import Path

from isotrain.parity.run import Run
from isotrain.parity.sources.bounded import Source, clipped
from isotrain.parity.sources.columns import Columns, step_of
from isotrain.parity.sources.numbers import number

COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# At the start, or after a prefix or a progress bar that shares the line.
_STEP = re.compile(r"(?:^|(?<=[\s\])]))step:(\S{1,40}) - ")


def metrics_of(line: bytes) -> tuple[str, list[str]] | None:
    """Step and `name:value` texts; None for the many lines that are something else."""
    if b"step:" not in line:
        return None
    text = COLOUR.sub("", line.decode("utf-8", errors="replace"))
    found = _STEP.search(text)
    if not found:
        return None
    pairs = text[found.end() :].strip().split(" - ")
    # Text of a model may say "step:" too; metrics do not start with anything but a number.
    return (found[1], pairs) if _pair(pairs[0]) else None


def read_verl_console(path: Path) -> Run:
    source = Source(path)
    columns = Columns(source, resumes=True)
    for line, content, ended in source.console_lines():
        # The last number of a line without an end may lack digits.
        found = metrics_of(content) if ended else None
        if not found:
            continue
        text, pairs = found
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
    return columns.run("verl console log", "no line `step:3 - name:0.5 - ...`")


def _pair(text: str) -> tuple[str, float] | None:
    name, colon, value = text.rpartition(":")
    found = number(value) if colon else None
    return (name.strip(), found) if name.strip() and found is not None else None
