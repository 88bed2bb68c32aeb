"""The metrics of a run that may still be going, read only where the file has grown; numbers for JSON."""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isotrain.files import open_regular
from isotrain.observe.metrics import decode_row
from isotrain.observe.mismatch_watch import METRIC as MISMATCH
from isotrain.observe.mismatch_watch import MismatchWatch

_CHUNK = 4 << 20
# As much of what was read last is compared again: a resumed run cuts its file and writes other lines.
_TAIL = 256
# Of a line; one of a run with a thousand metrics has 50 KB.
_LONGEST = 4 << 20
MOST_ROWS = 20_000


def finite_or_word(value: float | None) -> float | str | None:
    """JSON has no word for NaN and infinities: they become strings, as in `metrics.jsonl`."""
    return value if value is None or math.isfinite(value) else str(value)


class MetricsTail:
    """The rows of `metrics.jsonl` by metric. One thread refreshes, any number ask."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch = 0
        """Changes when earlier rows have changed: what was asked before is then worth nothing."""
        self.problem: str | None = None
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._offset, self._tail, self._rest = 0, b"", b""
        self._lines, self.watch = 0, MismatchWatch(str(self.path.parent))
        self._steps = array("q")
        # By name: the rows that have the metric, and its values there.
        self._columns: dict[str, tuple[array[int], array[float]]] = {}

    def refresh(self) -> None:
        """Read what was written since the last time; everything if the file is another one."""
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset - len(self._tail))
                if file.read(len(self._tail)) != self._tail:
                    with self._lock:
                        self._forget()
                        self.epoch += 1
                        self.problem = None
                    file.seek(0)
                while data := file.read(_CHUNK):
                    self._take(data)
        except FileNotFoundError:
            return
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror or error}"

    def _take(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        rest = rest[-_LONGEST:]  # what is cut off there is no row, and is told so when it ends
        with self._lock:
            self._offset += len(data)
            self._tail, self._rest = (self._tail + data)[-_TAIL:], rest
            for line in lines:
                self._lines += 1
                try:
                    row = decode_row(line)
                except ValueError as error:
                    self.problem = f"{self.path.name}, line {self._lines} is left out: {error}"
                    continue
                for name, value in row.items():
                    if name != "step":
                        rows, values = self._columns.setdefault(name, (array("i"), array("d")))
                        rows.append(len(self._steps))
                        values.append(value)
                self._steps.append(int(row["step"]))
                self.watch.observe(int(row["step"]), row.get(MISMATCH, math.nan))

    def summary(self) -> dict[str, Any]:
        with self._lock:
            return {
                "epoch": self.epoch,
                "rows": len(self._steps),
                "names": len(self._columns),
                "last": self._steps[-1] if self._steps else None,
                "problem": self.problem,
            }

    def names(self) -> dict[str, int]:
        """Every metric with the number of steps that have it."""
        with self._lock:
            return {name: len(rows) for name, (rows, _) in self._columns.items()}

    def curves(self, names: Iterable[str], after: int = 0, most: int = MOST_ROWS) -> dict[str, Any]:
        """Steps and values of these metrics in the rows from number `after` on, at most so many of them.

        `rows` is where to go on.
        """
        with self._lock:
            end = min(len(self._steps), after + most)
            curves = {}
            for name in names:
                if name in self._columns:
                    rows, values = self._columns[name]
                    at = range(bisect_left(rows, after), bisect_left(rows, end))
                    steps = [self._steps[rows[i]] for i in at]
                    curves[name] = {"steps": steps, "values": [finite_or_word(values[i]) for i in at]}
            return {"epoch": self.epoch, "rows": end, "all": len(self._steps), "curves": curves}
