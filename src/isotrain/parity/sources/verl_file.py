"""verl's `file` logger (0.6.0 to 0.8.0.dev): `{"step": 3, "data": {"actor/pg_loss": 0.1, ...}}` a line.

From 0.8 it writes NaN as null, so a null is read as NaN: the comparison shows it instead of a gap.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from isotrain.parity.run import Run
from isotrain.parity.sources.bounded import Source
from isotrain.parity.sources.columns import Columns, step_of
from isotrain.parity.sources.json_lines import objects, value_of


def is_verl_row(row: dict[str, Any]) -> bool:
    return "step" in row and isinstance(row.get("data"), dict)


def read_verl_file(path: Path) -> Run:
    source = Source(path)
    columns = Columns(source, resumes=True)
    for line, row in objects(source):
        if not is_verl_row(row):
            raise source.error('no "step" and "data" in it, as the lines before have', line)
        step = step_of(source, "step", row["step"], line)
        found = {name: math.nan if value is None else value_of(value) for name, value in row["data"].items()}
        columns.add_row(step, [(name, value) for name, value in found.items() if value is not None], line)
    return columns.run("verl file log", "no line has a number")
