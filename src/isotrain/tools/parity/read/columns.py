"""Metrics as they are read: two growing arrays each, without an object per value."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isotrain.errors import DataError
from isotrain.language import tr
from isotrain.tools.parity.read.bounded import Source, clipped, whole_number
from isotrain.tools.parity.run import RunLog, Series

MAX_METRICS = 10_000
MAX_VALUES = 20_000_000
MAX_NAME = 500
# More than a run has; with fewer, two runs in one file are told by their rows that take turns.
MAX_RESUMES = 100
_FEW_RESUMES = 3
_RESUMES_TOLD = 5


@dataclass(frozen=True)
class _Resume:
    line: int
    before: int
    """The last step of the attempt that was given up."""
    step: int
    """The first step of the new attempt."""


class Columns:
    """Rows of a log, as columns whose steps rise.

    With `resumes`, a row that goes back to a step that its metrics had is where the run was resumed: what the
    log said of later steps belongs to an attempt that was given up. Without, it is an error.
    """

    def __init__(self, source: Source, *, resumes: bool = False) -> None:
        self._source = source
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._count = 0
        self._last_step = -(2**63)
        self._rows = 0
        self._resumes: list[_Resume] | None = [] if resumes else None
        self._earlier: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __len__(self) -> int:
        return len(self._columns)

    def add_row(self, step: int, values: Sequence[tuple[str, float]], line: int) -> None:
        """Add the metrics of one line at one step."""
        if not values:
            return
        self._rows += 1
        if step > self._last_step:
            self._last_step = step
        elif self._resumes is not None:
            if self._resumes and step == self._resumes[-1].step:
                self._replace_earlier(values)
            if self._goes_back(step, values):
                self._resume(self._resumes, step, {name for name, _ in values}, line)
        for name, value in values:
            self._add(name, step, value, line)

    def run(self, kind: str, expected: str, notes: Sequence[str] = ()) -> RunLog:
        """The run of these metrics; without any, an error that says what was expected."""
        if not self._columns:
            raise self._source.error(f"no metrics in it: {expected}")
        resumes = self._resumes or []
        # Rows of two runs in turn look like a run that was resumed at every step.
        if len(resumes) >= _FEW_RESUMES and self._rows < 2 * (len(resumes) + 1):
            raise self._more_than_one_run(resumes, resumes[0].line)
        notes = (*notes, *_notes(resumes))
        return RunLog(self._source.path, kind, self.series(), sha256=self._source.sha256, notes=notes)

    def series(self) -> dict[str, Series]:
        return {
            name: Series(np.frombuffer(steps, np.int64), np.frombuffer(values, np.float64))
            for name, (steps, values) in self._columns.items()
            if steps
        }

    def _add(self, name: str, step: int, value: float, line: int) -> None:
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

    def _goes_back(self, step: int, values: Sequence[tuple[str, float]]) -> bool:
        """Not so a late row of other metrics, such as a validation, nor a line that was printed twice."""
        for name, value in values:
            steps, before = self._columns.get(name) or (None, None)
            if (
                steps
                and before
                and (steps[-1] > step or (steps[-1] == step and not _same(before[-1], value)))
            ):
                return True
        return False

    def _resume(self, resumes: list[_Resume], step: int, names: set[str], line: int) -> None:
        resumes.append(_Resume(line, self._last_step, step))
        if len(resumes) > MAX_RESUMES:
            raise self._more_than_one_run(resumes, line)
        self._last_step = step
        self._earlier = set()
        for name, (steps, values) in self._columns.items():
            kept = (bisect_left if name in names else bisect_right)(steps, step)
            del steps[kept:], values[kept:]
            if steps and steps[-1] == step:
                self._earlier.add(name)

    def _replace_earlier(self, values: Sequence[tuple[str, float]]) -> None:
        """Further rows of the step that the run was resumed at.

        What they do not replace stays: a validation of the checkpoint, before the first step, must not take
        the losses of the step that the checkpoint was saved at.
        """
        for name, _ in values:
            if name in self._earlier:
                self._earlier.remove(name)
                for column in self._columns[name]:
                    column.pop()

    def _more_than_one_run(self, resumes: list[_Resume], line: int) -> DataError:
        return self._source.error(
            f"its steps repeat or go back {len(resumes)} times: is this more than one run, or more than one "
            "value a step? Keep the lines of one",
            line,
        )

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
        if not _same(values[at], value):
            raise self._source.error(
                f"step {step} of {name} is {value!r} here and {values[at]!r} before: was the run resumed? "
                "Remove what it did twice",
                line,
            )


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _notes(resumes: Sequence[_Resume]) -> list[str]:
    notes = [
        tr(
            "resumed: line {line} goes back from step {before} to step {step}; the later values stand",
            line=resume.line,
            before=resume.before,
            step=resume.step,
        )
        for resume in resumes[:_RESUMES_TOLD]
    ]
    more = len(resumes) - len(notes)
    return [*notes, tr("resumed {count} more times", count=more)] if more > 0 else notes


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
