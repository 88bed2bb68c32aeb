"""`metrics.jsonl`: one strict JSON object a step, whose numbers read back bit for bit."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from isotrain.errors import DataError, RecipeError
from isotrain.files import open_own, parse_json, read_regular
from isotrain.observe.run_directory import write_atomically

# JSON has no word for these; strings keep the file readable by every parser.
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# No float64 holds a whole number of this size, and no array of 64 bits a step above the other.
_TOO_LARGE = 1 << 1023
_LARGEST_STEP = 1 << 53
_NOT_A_FILE = (errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EISDIR)


class MetricsLog:
    """The log of one run, open for appending."""

    def __init__(self, path: str | os.PathLike[str], *, resume_after: int | None = None) -> None:
        """Starts a new log, or goes on after a step as `resume` says."""
        self.path = Path(path)
        self._last_step = -1  # a validation before the first step is step 0
        if resume_after is not None:
            with named_errors(self.path):
                self._last_step = _cut(self.path, resume_after)
        elif self.path.exists() and self.path.stat().st_size > 0:
            raise RecipeError(f"{path} has metrics of another run: resume that run, or set another output")
        # Unbuffered, so that a line is one write call and a kill leaves at most the last line torn.
        with named_errors(self.path):
            self._file = open_own(self.path, "ab")

    @classmethod
    def resume(cls, path: str | os.PathLike[str], last_step: int) -> MetricsLog:
        """Open a log to resume after `last_step`: later lines and a torn last one are dropped.

        Everything else stays byte for byte. `last_step=0` starts the log afresh.
        """
        return cls(path, resume_after=last_step)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the line of one step; it is out of this process when the call returns."""
        assert "step" not in values, "the step is an argument of its own"
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        numbers = {name: float(value) for name, value in values.items()}
        row = {"step": int(step), **{k: v if math.isfinite(v) else str(v) for k, v in numbers.items()}}
        line = memoryview(json.dumps(row, allow_nan=False).encode() + b"\n")
        # One call in all but name: only a full disk writes less, and then the next call raises.
        with named_errors(self.path):
            while line:
                line = line[self._file.write(line) :]
        self._last_step = step

    def sync(self) -> None:
        """Waits for the disk: after this, not even a power cut loses a line. For use before a checkpoint."""
        with named_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """All rows of a log, `step` included. A torn last line is left out; any other broken line is an error."""
    path = Path(path)
    try:
        data = read_regular(path)
    except OSError as error:
        raise DataError(
            f"cannot read {path} ({error.strerror}): give the directory of a run that has taken a step"
        ) from error
    return [row for _, row in _lines(path, data)]


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """A full or lost disk ends the run: a step without its metrics would be missing for good."""
    try:
        yield
    except OSError as error:
        remedy = "make it a plain file" if error.errno in _NOT_A_FILE else "free disk space"
        raise RecipeError(
            f"output: cannot write {path} ({error.strerror or error}): "
            f"{remedy}, then run the same command again"
        ) from error


def _cut(path: Path, last_step: int) -> int:
    """Drops what is later than `last_step`, everything for 0; returns the last step that is left, or -1."""
    before = read_regular(path) if os.path.lexists(path) else b""
    kept = [(line, row) for line, row in _lines(path, before) if row["step"] <= last_step and last_step > 0]
    # A line that lost only its newline is whole: the newline is given back.
    after = b"".join(line + b"\n" for line, _ in kept)
    if after != before:
        write_atomically(path, after)
    return int(kept[-1][1]["step"]) if kept else -1


def _lines(path: Path, data: bytes) -> Iterator[tuple[bytes, dict[str, float]]]:
    """The lines of a log without their newline, each with what it says."""
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        torn = number == len(lines)
        if torn and not line:
            return
        try:
            row = decode_row(line)
        except ValueError as error:
            if torn:
                return
            raise DataError(
                f"{path}, line {number}: not a metrics row ({error}); remove the line to read the rest"
            ) from error
        yield line, row


def decode_row(line: bytes) -> dict[str, float]:
    """Values of one line, `step` included; a `ValueError` if it is not a row of a log."""
    row = parse_json(line, constants=_refuse)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    for name, value in row.items():
        if isinstance(value, str) and value in NON_FINITE:
            row[name] = NON_FINITE[value]
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name} is not a number: {value!r:.60}")
        elif isinstance(value, int) and abs(value) >= _TOO_LARGE:
            raise ValueError(f"{name} is too large a number")
    if not isinstance(step := row.get("step"), int) or not 0 <= step < _LARGEST_STEP:
        raise ValueError("no whole number `step`")
    return row


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
