"""Tables of metrics: CSV with named columns, JSONL of any origin, and what wandb and SwanLab export.

wandb, from a chart: `"Step","RUN - METRIC","RUN - METRIC__MIN","RUN - METRIC__MAX"`. Its points are averages
where the chart had fewer points than the run had steps; smallest and largest value then differ.
SwanLab (`POST /house/metrics/scalar/export`, which its charts and `swanlab.Api` use):
`step,EXPERIMENT-METRIC_step,EXPERIMENT-METRIC_timestamp`, where `_step` holds the values. Its older
`metrics()` makes tables with `METRIC,METRIC_timestamp`.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from isotrain.files import parse_json
from isotrain.language import tr
from isotrain.tools.parity.read.bounded import Source, clipped, number
from isotrain.tools.parity.read.columns import MAX_METRICS, Columns, step_of
from isotrain.tools.parity.run import RunLog

_LEAST, _LARGEST = "__MIN", "__MAX"
_VALUE, _TIME = "_step", "_timestamp"
# Columns that wandb adds to a run's history.
BOOKKEEPING = ("_runtime", "_timestamp")
# Metrics of verl with a hyphen that does not end an experiment's name.
_HYPHENATED = (("-val", "core/"), ("-val", "aux/"))
_RUNS_SHOWN = 5

STEP_NAMES = ("step", "global_step", "_step")
# JSON has no word for these; writers that keep to the standard use strings.
NON_FINITE = {"nan", "inf", "-inf", "+inf", "infinity", "-infinity", "+infinity"}
_DELIMITERS = ",\t;"


@dataclass(frozen=True)
class Layout:
    """Meaning of a table's columns."""

    format: str
    names: list[str]
    """The metric of each column; empty for what is none."""
    step: int | None = None
    """The column that counts steps, where its name does not say so."""
    extremes: Sequence[tuple[int, int]] = ()
    """Columns of the smallest and the largest value behind a point."""
    notes: tuple[str, ...] = ()


def layout(source: Source, header: list[str], line: int) -> Layout:
    known = set(header)
    charted = [name for name in header if {name + _LEAST, name + _LARGEST} <= known and " - " in name]
    if charted:
        return _wandb_chart(source, header, charted, line)
    pairs = [name.removesuffix(_TIME) for name in header if name.endswith(_TIME)]
    if pairs and all("-" in name for name in pairs) and {name + _VALUE for name in pairs} <= known:
        return _swanlab(source, header, pairs, line)
    times = {name + _TIME for name in known} & known
    return Layout("CSV", ["" if name in times or name in BOOKKEEPING else name for name in header])


def averaged(table: Layout, row: list[str]) -> bool:
    """Whether a row stands for more than one step."""
    return any(row[least] != row[largest] for least, largest in table.extremes)


def _wandb_chart(source: Source, header: list[str], charted: list[str], line: int) -> Layout:
    run, metrics = _one_run(source, charted, " - ", line)
    # With another x-axis than the step, wandb adds its own count of rows.
    named = {name: metric for name, metric in zip(charted, metrics, strict=True) if metric != "_step"}
    extremes = [(header.index(name + _LEAST), header.index(name + _LARGEST)) for name in named]
    names = [named.get(name, "") for name in header]
    step = 0 if header[0] not in charted else None
    return Layout("wandb chart export", names, step, extremes, (f"run {clipped(run, 200)}",))


def _swanlab(source: Source, header: list[str], pairs: list[str], line: int) -> Layout:
    run, metrics = _one_run(source, pairs, "-", line)
    named = {name + _VALUE: metric for name, metric in zip(pairs, metrics, strict=True)}
    names = [named.get(name, "") for name in header]
    return Layout("SwanLab export", names, notes=(f"experiment {clipped(run, 200)}",))


def _one_run(source: Source, columns: list[str], separator: str, line: int) -> tuple[str, list[str]]:
    """The run's name, which every column starts with, and the metrics'; both may contain the separator."""
    split = [_split(name, separator) for name in columns]
    runs, metrics = list(dict.fromkeys(run for run, _ in split)), [metric for _, metric in split]
    if len(runs) == 1:
        return runs[0], metrics
    prefix = _common_prefix(columns)
    run = (
        _split(prefix[: prefix.rfind(separator) + len(separator)], separator)[0]
        if separator in prefix
        else ""
    )
    if len(set(metrics)) < len(metrics) or not run:
        more = ["..."] if len(runs) > _RUNS_SHOWN else []
        shown = ", ".join([*(clipped(name, 100) for name in runs[:_RUNS_SHOWN]), *more])
        raise source.error(
            f"columns of {len(runs)} runs ({shown}): export one, or keep its columns, named as its metrics",
            line,
        )
    return run, [name[len(run) + len(separator) :] for name in columns]


def _split(name: str, separator: str) -> tuple[str, str]:
    run, _, metric = name.rpartition(separator)
    for end, start in _HYPHENATED:
        if separator == "-" and run.endswith(end) and metric.startswith(start):
            return run.removesuffix(end), end[1:] + separator + metric
    return run, metric


def _common_prefix(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:same]


def objects(source: Source) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line line_number and object of every line; a torn last line of a live run is left out."""
    for line_number, line, ended in source.lines():
        if not line.strip():
            continue
        try:
            row = parse_json(line.decode("utf-8-sig" if line_number == 1 else "utf-8"))
        except ValueError as error:
            if not ended:
                return
            raise source.error(f"not JSON ({clipped(str(error))})", line_number) from error
        if not isinstance(row, dict):
            raise source.error("not a JSON object", line_number)
        yield line_number, row


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


def read_json_lines(path: Path) -> RunLog:
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
            number_value = value if type(value) is float else value_of(value)
            if number_value is not None:
                metrics.append((name, number_value))
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


def is_csv_header(line: str) -> bool:
    return step_name(_cells(line)) is not None


def read_csv(path: Path) -> RunLog:
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
