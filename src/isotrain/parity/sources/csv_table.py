"""CSV with named columns: one counts steps, all others that hold numbers are metrics."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from isotrain.language import tr
from isotrain.parity.run import Run
from isotrain.parity.sources.bounded import Source, clipped
from isotrain.parity.sources.columns import MAX_METRICS, Columns, step_of
from isotrain.parity.sources.json_lines import STEP_NAMES, step_name
from isotrain.parity.sources.numbers import number
from isotrain.parity.sources.tracker_export import Layout, averaged, layout

_DELIMITERS = ",\t;"


def is_csv_header(line: str) -> bool:
    return step_name(_cells(line)) is not None


def read_csv(path: Path) -> Run:
    source = Source(path)
    columns = Columns(source, resumes=True)
    text: dict[str, int] = {}
    table = Layout("CSV", [])
    step_at, rows, averages = -1, 0, 0
    for line, row, ended in _rows(source):
        if not table.names:
            table, step_at = _header(source, [name.strip() for name in row], line)
            continue
        if len(row) != len(table.names):
            if not ended:
                break  # the torn last line of a live run
            raise source.error(f"{len(row)} cells, and the header has {len(table.names)}", line)
        step = step_of(source, "step", row[step_at], line)
        metrics = []
        for name, cell in zip(table.names, row, strict=True):
            if not name:
                continue
            value = number(cell)
            if value is not None:
                metrics.append((name, value))
            elif cell and not cell.isspace():
                text.setdefault(name, line)
        columns.add_row(step, metrics, line)
        rows, averages = rows + 1, averages + averaged(table, row)
    for name, line in text.items():
        if name in columns:
            raise source.error(f"column {clipped(name)} holds text here and numbers elsewhere", line)
    notes = list(table.notes)
    if averages:
        notes.append(
            tr(
                "{averages} of {rows} points are averages over several steps, as the chart had them: export "
                "run.scan_history() for the values themselves",
                averages=averages,
                rows=rows,
            )
        )
    return columns.run(table.format, "no row has a step and a number", notes)


def _header(source: Source, header: list[str], line: int) -> tuple[Layout, int]:
    """The columns, and which one counts steps."""
    if len(header) > MAX_METRICS:
        raise source.error(f"more than {MAX_METRICS} columns: is this a log of metrics?", line)
    twice = [name for name, count in Counter(header).items() if name and count > 1]
    if twice:
        raise source.error(f"two columns are called {clipped(twice[0])}", line)
    table = layout(source, header, line)
    name = step_name(header)
    at = table.step if name is None else header.index(name)
    if at is None:
        raise source.error(
            f"no column {', '.join(STEP_NAMES[:-1])} or {STEP_NAMES[-1]} in the header: rename the one that "
            "counts steps",
            line,
        )
    # A column without a name is an index of rows, as pandas writes it.
    names = ["" if column == at else name for column, name in enumerate(table.names)]
    return replace(table, names=names), at


def _rows(source: Source) -> Iterator[tuple[int, list[str], bool]]:
    last_ended = True

    def texts() -> Iterator[str]:
        nonlocal last_ended
        for line, content, ended in source.lines():
            last_ended = ended
            try:
                yield content.decode("utf-8-sig" if line == 1 else "utf-8").rstrip("\r") + "\n"
            except UnicodeDecodeError as error:
                raise source.error("not UTF-8", line) from error

    lines = texts()
    first = next(lines, "")
    # The first line decides on the delimiter, and then is read as the header.
    reader = csv.reader(chain([first], lines), strict=True, delimiter=_delimiter(first))
    try:
        for row in reader:
            if row:
                yield reader.line_num, row, last_ended
    except csv.Error as error:
        raise source.error(f"not CSV ({error})", reader.line_num) from error


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=_delimiter(line)), [])
    except csv.Error:
        return []


def _delimiter(line: str) -> str:
    return max(_DELIMITERS, key=line.count)
