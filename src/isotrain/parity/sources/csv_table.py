"""CSV with named columns: one counts steps, all others that hold numbers are metrics."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from isotrain.parity.run import Run
from isotrain.parity.sources.bounded import Source, clipped
from isotrain.parity.sources.columns import MAX_METRICS, Columns, step_of
from isotrain.parity.sources.json_lines import STEP_NAMES, step_name
from isotrain.parity.sources.numbers import number

_DELIMITERS = ",\t;"


def is_csv_header(line: str) -> bool:
    return step_name(_cells(line)) is not None


def read_csv(path: Path) -> Run:
    source = Source(path)
    columns = Columns(source, resumes=True)
    text: dict[str, int] = {}
    header: list[str] = []
    at = -1
    for line, row, ended in _rows(source):
        if not header:
            header = [name.strip() for name in row]
            at = _step_column(source, header, line)
            continue
        if len(row) != len(header):
            if not ended:
                break  # the torn last line of a live run
            raise source.error(f"{len(row)} cells, and the header has {len(header)}", line)
        step = step_of(source, header[at], row[at], line)
        metrics = []
        for name, cell in zip(header, row, strict=True):
            # Only an index of rows, as pandas writes it, has no name.
            if not name or name == header[at]:
                continue
            value = number(cell)
            if value is not None:
                metrics.append((name, value))
            elif cell and not cell.isspace():
                text.setdefault(name, line)
        columns.add_row(step, metrics, line)
    for name, line in text.items():
        if name in columns:
            raise source.error(f"column {clipped(name)} holds text here and numbers elsewhere", line)
    return columns.run("CSV", "no row has a step and a number")


def _step_column(source: Source, header: list[str], line: int) -> int:
    name = step_name(header)
    if name is None:
        raise source.error(
            f"no column {', '.join(STEP_NAMES[:-1])} or {STEP_NAMES[-1]} in the header: rename the one that "
            "counts steps",
            line,
        )
    if len(header) > MAX_METRICS:
        raise source.error(f"more than {MAX_METRICS} columns: is this a log of metrics?", line)
    twice = [name for name, count in Counter(header).items() if name and count > 1]
    if twice:
        raise source.error(f"two columns are called {clipped(twice[0])}", line)
    return header.index(name)


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
