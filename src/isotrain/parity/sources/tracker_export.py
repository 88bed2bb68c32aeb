"""Which columns of a CSV file are metrics, where wandb or SwanLab exported it.

wandb, from a chart: `"Step","RUN - METRIC","RUN - METRIC__MIN","RUN - METRIC__MAX"`. Its points are averages
where the chart had fewer points than the run had steps; smallest and largest value then differ.
SwanLab (`POST /house/metrics/scalar/export`, which its charts and `swanlab.Api` use):
`step,EXPERIMENT-METRIC_step,EXPERIMENT-METRIC_timestamp`, where `_step` holds the values. Its older
`metrics()` makes tables with `METRIC,METRIC_timestamp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isotrain.parity.sources.bounded import Source, clipped

_LEAST, _LARGEST = "__MIN", "__MAX"
_VALUE, _TIME = "_step", "_timestamp"
# Columns that wandb adds to a run's history.
BOOKKEEPING = ("_runtime", "_timestamp")
# Metrics of verl with a hyphen that does not end an experiment's name.
_HYPHENATED = (("-val", "core/"), ("-val", "aux/"))
_RUNS_SHOWN = 5


@dataclass(frozen=True)
class Layout:
    """What the columns of a table are."""

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
