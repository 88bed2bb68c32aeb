"""Metrics as they are read: two growing arrays each, without an object per value."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left

import numpy as np

from isotrain.parity.run import Run, Series
from isotrain.parity.sources.bounded import Source, clipped
from isotrain.parity.sources.numbers import whole_number

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

    def run(self, kind: str, expected: str) -> Run:
        """The run of these metrics; without any, an error that says what was expected."""
        if not self._columns:
            raise self._source.error(f"no metrics in it: {expected}")
        return Run(self._source.path, kind, self.series(), sha256=self._source.sha256)

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


def step_of(source: Source, name: str, value: object, line: int) -> int:
    step = whole_number(value)
    if step is None:
        raise source.error(f"{name} is not a whole number: {clipped(str(value))}", line)
    return step


def check_new_metric(source: Source, known: int, name: str, line: int | None = None) -> None:
    """Names go into tables, plots and terminals, so they are short and printable."""
    if known >= MAX_METRICS:
        raise source.error(f"more than {MAX_METRICS} metrics: is this a log of metrics?", line)
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise source.error(f"{clipped(name)} is not the name of a metric", line)


def too_many_values(source: Source) -> Exception:
    return source.error(f"more than {MAX_VALUES:,} values: thin it out, or remove metrics")
