"""TensorBoard event files (as tensorboard 2.21 and torch 2.13 write them), a file or a directory of them.

A resumed run repeats steps, mostly in one more file: the later value counts. What older files hold at or
after the first step of a new one is dropped: those steps were taken again, or never became part of the run.
"""

from __future__ import annotations

import os
import re
import struct
from array import array
from pathlib import Path

import numpy as np

from isotrain.errors import DataError
from isotrain.language import tr
from isotrain.parity.run import Run, Series
from isotrain.parity.sources.bounded import Source, clipped, inside
from isotrain.parity.sources.columns import MAX_VALUES, check_new_metric, too_many_values
from isotrain.parity.sources.event import WireError, scalars, signed, varint
from isotrain.parity.sources.tfrecord import chunks, damaged

_FLOAT = struct.Struct("<f")
_STAMP = re.compile(r"tfevents\.([0-9]{1,18})")
_MAX_FILES = 10_000

Curves = dict[str, tuple["array[int]", "array[float]"]]


def is_event_file(name: str) -> bool:
    # Beside events, profilers leave files of their own.
    return "tfevents" in name and not name.endswith(".profile-empty")


def event_files(directory: Path) -> list[Path]:
    """Those of one run, oldest first: in the directory itself, or in the only one below it that has some."""
    found: dict[Path, list[str]] = {}
    seen = 0
    for place, folders, names in os.walk(directory):
        folders.sort()
        events = [name for name in names if is_event_file(name)]
        if events:
            found[Path(place)] = events
            if Path(place) == directory:
                break
        seen += len(names) + len(folders)
        if seen > _MAX_FILES:
            raise DataError(
                f"{directory}: more than {_MAX_FILES} files: give the directory with the event files"
            )
    if len(found) > 1:
        shown = ", ".join(str(folder.relative_to(directory)) for folder in list(found)[:5])
        raise DataError(f"{directory}: event files of more than one run: give one of {shown}")
    return [folder / name for folder, files in found.items() for name in sorted(files, key=_age)]


def _age(name: str) -> tuple[int, str]:
    stamp = _STAMP.search(name)
    return (int(stamp[1]) if stamp else 0, name)


def read_tensorboard(path: Path) -> Run:
    files = event_files(path) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no event files in it")
    sessions: list[Curves] = []
    digests: dict[str, str] = {}
    plugins: dict[str, str] = {}
    left = MAX_VALUES
    for file in files:
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        source = Source(inside(path, name) if path.is_dir() else file, name)
        session = _read_file(source, plugins, left)
        left -= sum(len(steps) for steps, _ in session.values())
        sessions.append(session)
        digests |= source.sha256
    metrics, notes = _join(dict(zip(digests, sessions, strict=True)))
    if not metrics:
        raise DataError(f"{path}: no metrics in it: no scalars were written")
    return Run(path=path, format="TensorBoard events", metrics=metrics, sha256=digests, notes=tuple(notes))


def _read_file(source: Source, plugins: dict[str, str], left: int) -> Curves:
    curves: Curves = {}
    known: dict[bytes, tuple[array[int], array[float]]] = {}
    for chunk in chunks(source):
        data = chunk.data
        for at, end in zip(chunk.starts, chunk.ends, strict=True):
            try:
                # Scalars of a tag differ in time, step and value only; the rest is looked up in one piece.
                if end - at > 16 and data[at] == 0x09 and data[at + 9] == 0x10:
                    step, head = varint(data, at + 10, end)
                    curve = known.get(data[head : end - 4])
                    if curve is not None:
                        curve[0].append(signed(step))
                        curve[1].append(_FLOAT.unpack_from(data, end - 4)[0])
                        continue
                step, values = scalars(data, at, end, plugins)
            except WireError as error:
                raise damaged(source, chunk.offset + at - 12) from error
            for tag, value in values:
                if tag not in curves:
                    check_new_metric(source, len(curves), tag)
                    curves[tag] = (array("q"), array("d"))
                curves[tag][0].append(step)
                curves[tag][1].append(value)
            if len(values) == 1:
                known[_head(values[0][0])] = curves[values[0][0]]
        if sum(len(steps) for steps, _ in curves.values()) > left:
            raise too_many_values(source)
    return curves


def _head(tag: str) -> bytes:
    """What stands between step and value of an event with one plain scalar."""
    name = tag.encode()
    value = b"\x0a" + _length(len(name)) + name + b"\x15"
    summary = b"\x0a" + _length(len(value) + 4) + value
    return b"\x2a" + _length(len(summary) + 4) + summary


def _length(value: int) -> bytes:
    return bytes((value,)) if value < 0x80 else bytes((value & 0x7F | 0x80, value >> 7))


def _join(sessions: dict[str, Curves]) -> tuple[dict[str, Series], list[str]]:
    joined: dict[str, Series] = {}
    notes: list[str] = []
    for name, session in sessions.items():
        curves = {tag: _last_of_each_step(*curve) for tag, curve in session.items()}
        # A file with other tags only is a second writer of the same run, and takes nothing back.
        shared = [curves[tag].steps_S[0] for tag in curves if tag in joined]
        if shared:
            first = int(min(shared))
            if any(len(series) and series.steps_S[-1] >= first for series in joined.values()):
                notes.append(
                    tr(
                        "resumed: {file} starts at step {step}; the later values stand",
                        file=clipped(name, 200),
                        step=first,
                    )
                )
            joined = {tag: _before(series, first) for tag, series in joined.items()}
        for tag, series in curves.items():
            before = joined.get(tag)
            if before is not None:
                series = Series(
                    np.concatenate([before.steps_S, series.steps_S]),
                    np.concatenate([before.values_S, series.values_S]),
                )
            joined[tag] = series
    return {tag: series for tag, series in joined.items() if len(series)}, notes


def _before(series: Series, step: int) -> Series:
    count = int(np.searchsorted(series.steps_S, step))
    return Series(series.steps_S[:count], series.values_S[:count])


def _last_of_each_step(steps: array[int], values: array[float]) -> Series:
    steps_S, values_S = np.frombuffer(steps, np.int64), np.frombuffer(values, np.float64)
    if (steps_S[1:] > steps_S[:-1]).all():
        return Series(steps_S, values_S)
    order = np.argsort(steps_S, kind="stable")
    steps_S, values_S = steps_S[order], values_S[order]
    last = np.append(steps_S[1:] != steps_S[:-1], True)
    return Series(steps_S[last], values_S[last])
