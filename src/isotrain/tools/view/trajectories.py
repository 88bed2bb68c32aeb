"""An index of all recorded trajectories of a run: what a table shows of each, sorted and filtered.

It grows while the run goes on. A file is looked at once, the newest step first, and again if it was replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isotrain.data.record import step_and_rank, step_file
from isotrain.errors import DataError
from isotrain.tools.view.metrics import finite_or_word
from isotrain.tools.view.parquet import TEXTS, Column, read_index

NUMBERS = (
    *("step", "rank", "index", "row", "prompt_index", "sample", "finished", "score", "reward", "advantage"),
    *("length", "trained", "prompt_length", "version", "newest", "part"),
)
COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_MOST_PROBLEMS = 5
# Each row of the index takes about 120 bytes, each different text up to 200 characters.
MOST_ROWS, _MOST_WORDS = 10_000_000, 10_000
_TICK_NS = 2_000_000_000


class Condition(NamedTuple):
    column: str
    comparison: str
    """One of COMPARISONS; for texts `eq`, `ne` or `has`."""
    value: str


class _File(NamedTuple):
    stamp: tuple[int, int, int]
    columns: dict[str, Column]
    ranks: int | None
    problem: str | None

    @property
    def rows(self) -> int:
        return len(self.columns["step"]) if self.columns else 0


class _Trajectories(NamedTuple):
    columns: dict[str, Column]
    files: int


class TrajectoryIndex:
    """One thread refreshes, any number ask."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pending = 0
        self.revision = 0
        self._files: dict[tuple[int, int], _File] = {}
        # Sources and kinds of failure are few: rows hold their numbers.
        self._words: list[str] = []
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        self._table: _Trajectories | None = None
        # Of a directory of which everything is known: long runs have too many files to look at every second.
        self._settled: int | None = None

    def refresh(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Look at new and replaced files until `stop` says so, and forget removed ones."""
        changed, listed = _changed_at(self.directory), time.time_ns()
        if self._settled is not None and changed == self._settled:
            return
        self._settled = None
        try:
            paths = {key: path for path in self.directory.iterdir() if (key := step_and_rank(path.name))}
        except OSError:
            paths = {}
        stamps = {key: stamp for key, path in paths.items() if (stamp := _stamp(path))}
        with self._lock:
            for gone in self._files.keys() - stamps.keys():
                del self._files[gone]
                self._changed()
        new = {key for key in stamps if key not in self._files or self._files[key].stamp != stamps[key]}
        waiting = sorted(new, reverse=True)
        self.pending = len(waiting)
        room = MOST_ROWS - sum(file.rows for key, file in self._files.items() if key not in new)
        for key in waiting:
            if stop():
                return
            file = self._look_at(paths[key], key, stamps[key], room)
            room -= file.rows
            with self._lock:
                self._files[key] = file
                self.pending -= 1
                self._changed()
        # A directory that changes again in the same tick of the clock looks as if it had not.
        if changed is not None and listed - changed > _TICK_NS:
            self._settled = changed

    def _changed(self) -> None:
        self._table = None
        self.revision += 1

    def _look_at(self, path: Path, key: tuple[int, int], stamp: tuple[int, int, int], room: int) -> _File:
        try:
            columns, texts, ranks = read_index(path)
        except DataError as error:
            return _File(stamp, {}, None, str(error))
        rows = len(texts[TEXTS[0]])
        if rows > room:
            many = f"the run has more than {MOST_ROWS:,} rows"
            return _File(stamp, {}, None, f"{path.name} is not shown: {many}")
        columns["step"] = np.full(rows, key[0], np.int32)
        columns["rank"] = np.full(rows, key[1], np.int32)
        columns["index"] = np.arange(rows, dtype=np.int32)
        for name, values in texts.items():
            columns[name] = np.array([self._number_of(value) for value in values], np.int32)
        return _File(stamp, columns if rows else {}, ranks, None)

    def _number_of(self, text: str | None) -> int:
        if text is None:
            return -1
        if text not in self._numbers and len(self._words) >= _MOST_WORDS:
            text = "(one of too many texts)"
        if text not in self._numbers:
            self._words.append(text)
            self._numbers[text] = len(self._words) - 1
        return self._numbers[text]

    def _whole(self) -> _Trajectories:
        with self._lock:
            if self._table is None:
                ranks = {step: file.ranks for (step, rank), file in self._files.items() if rank == 0}
                # A run that went on with fewer ranks has left files of the others behind.
                kept = [
                    file
                    for (step, rank), file in sorted(self._files.items())
                    if file.columns and rank < (ranks.get(step) or rank + 1)
                ]
                names = (*NUMBERS, *TEXTS)
                parts = {name: [file.columns[name] for file in kept] for name in names}
                columns = {
                    name: np.concatenate(values) if values else np.zeros(0) for name, values in parts.items()
                }
                self._table = _Trajectories(columns, len(kept))
            return self._table

    def summary(self) -> dict[str, Any]:
        table = self._whole()
        steps = table.columns["step"]
        with self._lock:
            problems = [file.problem for file in self._files.values() if file.problem]
        return {
            "revision": self.revision,
            "pending": self.pending,
            "rows": len(steps),
            "files": table.files,
            "first": int(steps[0]) if len(steps) else None,
            "last": int(steps[-1]) if len(steps) else None,
            "problems": problems[:_MOST_PROBLEMS],
            "more_problems": max(0, len(problems) - _MOST_PROBLEMS),
        }

    def page(
        self, conditions: Sequence[Condition], sort: str, descending: bool, offset: int, limit: int
    ) -> dict[str, Any]:
        """Rows `offset` to `offset + limit` of those that meet all conditions, in the wanted order."""
        table = self._whole()
        chosen = np.flatnonzero(self._meets(table, conditions))
        ordered = chosen[self._order(table, chosen, sort, descending)]
        return {
            "rows": [self._as_row(table, int(i)) for i in ordered[offset : offset + limit]],
            "found": len(ordered),
            "all": len(table.columns["step"]),
            "revision": self.revision,
        }

    def group(self, step: int, prompt_index: int, most: int) -> list[dict[str, Any]]:
        """The rows of one group, in the order of its responses."""
        table = self._whole()
        same = (table.columns["step"] == step) & (table.columns["prompt_index"] == prompt_index)
        rows = np.flatnonzero(same)
        order = np.lexsort(tuple(table.columns[name][rows] for name in ("index", "rank", "part", "sample")))
        return [self._as_row(table, int(i)) for i in rows[order][:most]]

    def groups(self) -> list[tuple[int, int, int]]:
        """Step, prompt index and number of rows of every group, in this order."""
        columns = self._whole().columns
        if not len(columns["step"]):
            return []
        pairs = np.stack([columns["step"].astype(np.int64), columns["prompt_index"].astype(np.int64)])
        groups, counts = np.unique(pairs, axis=1, return_counts=True)
        return [(int(s), int(p), int(n)) for s, p, n in zip(*groups, counts, strict=True)]

    def file(self, step: int, rank: int) -> Path:
        """Only files that the index knows can be opened."""
        if (step, rank) not in self._files:
            raise DataError(f"rank {rank} has recorded nothing at step {step}")
        return step_file(self.directory, step, rank)

    def _meets(self, table: _Trajectories, conditions: Sequence[Condition]) -> Column:
        met: Column = np.ones(len(table.columns["step"]), np.bool_)
        for column, comparison, value in conditions:
            values = table.columns[column]
            if column in TEXTS:
                met &= np.isin(values, self._like(comparison, value))
            else:
                met &= COMPARISONS[comparison](values, float(value))
        return met

    def _like(self, comparison: str, value: str) -> list[int]:
        """The numbers of the texts that meet a condition; no text at all is the empty one."""
        words = ["", *self._words]
        if comparison == "has":
            return [i - 1 for i, word in enumerate(words) if value.lower() in word.lower() and word]
        return [i - 1 for i, word in enumerate(words) if (word == value) == (comparison == "eq")]

    def _order(self, table: _Trajectories, chosen: Column, sort: str, descending: bool) -> Column:
        keys = [table.columns[name][chosen] for name in ("index", "rank", "part", "sample", "prompt_index")]
        # Newest first among equals, whatever the direction; texts in the order of the alphabet.
        keys.append(-table.columns["step"][chosen])
        values = table.columns[sort][chosen]
        if sort in TEXTS:
            # No text has the number -1, which finds the last of these.
            ranked = np.argsort(np.argsort([*self._words, ""]))
            values = ranked[values] if len(values) else values
        values = values.astype(np.float64)
        keys.append(-values if descending else values)
        keys.append(np.isnan(values))  # what is not known comes last in both directions
        order: Column = np.lexsort(keys)
        return order

    def _as_row(self, table: _Trajectories, i: int) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for name in NUMBERS:
            value = table.columns[name][i].item()
            row[name] = finite_or_word(value) if isinstance(value, float) else value
        for name in TEXTS:
            number = int(table.columns[name][i])
            row[name] = self._words[number] if number >= 0 else None
        return row


def _changed_at(directory: Path) -> int | None:
    """Every file that is renamed into the directory changes it."""
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
