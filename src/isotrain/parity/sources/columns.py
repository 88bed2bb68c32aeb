"""Metrics as they are read: two growing arrays each, without an object per value."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left

import numpy as np

from isotrain.parity.run import Series
from isotrain.parity.sources.bounded import Source, clipped

MAX_METRICS = 10_000
MAX_VALUES = 20_000_000
MAX_NAME = 500


class Columns:
    """Steps of a metric must rise; the same value twice is one, another value at a step is an error."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._count = 0

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __len__(self) -> int:
        return len(self._columns)

    def add(self, name: str, step: int, value: float, line: int) -> None:
        column = self._columns.get(name)
        if column is None:
            check_new_metric(self._source, len(self._columns), name, line)
            column = self._columns[name] = (array("q"), array("d"))
        steps, values = column
        if steps and step <= steps[-1]:
            self._check_repeated(name, column, step, value, line)
            return
        self._count += 1
        if self._count > MAX_VALUES:
            raise too_many_values(self._source)
        steps.append(step)
        values.append(value)

    def series(self) -> dict[str, Series]:
        return {
            name: Series(np.frombuffer(steps, np.int64), np.frombuffer(values, np.float64))
            for name, (steps, values) in self._columns.items()
        }

    def _check_repeated(
        self, name: str, column: tuple[array[int], array[float]], step: int, value: float, line: int
    ) -> None:
        steps, values = column
        at = bisect_left(steps, step)
        if steps[at] != step:
            raise self._source.error(
                f"step {step} of {name} comes after step {steps[-1]}: is this more than one run? "
                "Keep the lines of one",
                line,
            )
        before = values[at]
        if before != value and not (math.isnan(before) and math.isnan(value)):
            raise self._source.error(
                f"step {step} of {name} is {value!r} here and {before!r} before: was the run resumed? "
                "Remove what it did twice",
                line,
            )


def check_new_metric(source: Source, known: int, name: str, line: int | None = None) -> None:
    """Names go into tables, plots and terminals, so they are short and printable."""
    if known >= MAX_METRICS:
        raise source.error(f"more than {MAX_METRICS} metrics: is this a log of metrics?", line)
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise source.error(f"{clipped(name)} is not the name of a metric", line)


def too_many_values(source: Source) -> Exception:
    return source.error(f"more than {MAX_VALUES:,} values: thin it out, or remove metrics")
