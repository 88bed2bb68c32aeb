"""TensorBoard event files (as tensorboard 2.21 and torch 2.13 write them), a file or a directory of them.

A resumed run repeats steps, mostly in one more file: the later value counts. What older files hold at or
after the first step of a new one is dropped: those steps were taken again, or never became part of the run.
Records are framed as length, checksum of the length, content, checksum of the content. Both checksums are
CRC32C, rotated and shifted as TensorFlow does it, so that checksums of checksums differ. TensorBoard's own
loader is not used: it takes 30 times as long (10 s for 100,000 scalars), and allocates whatever length the
header of a damaged record claims.
N: records of a chunk.
"""

from __future__ import annotations

import os
import re
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from isotrain.errors import DataError
from isotrain.language import tr
from isotrain.tools.parity.read.bounded import Source, clipped, inside
from isotrain.tools.parity.read.columns import MAX_VALUES, check_new_metric, too_many_values
from isotrain.tools.parity.run import RunLog, Series

_HEADER = struct.Struct("<QI")
_CHUNK = 4 << 20
# Longer ones hold images and the like, which are passed over.
LONGEST_CHECKED = 4096
_LONGEST_KEPT = 8 << 20

# How one element is stored, by TensorFlow's numbers for types.
_CONTENT = {1: "<f", 2: "<d", 3: "<i", 9: "<q", 19: "<e"}

Message = dict[int, list[int | bytes]]
_FLOAT = struct.Struct("<f")
_STAMP = re.compile(r"tfevents\.([0-9]{1,18})")
_MAX_FILES = 10_000

Curves = dict[str, tuple["array[int]", "array[float]"]]


@dataclass(frozen=True)
class Chunk:
    """Bytes of a file and where whole records are in them."""

    offset: int
    data: bytes
    starts: list[int]
    ends: list[int]


def _table() -> npt.NDArray[np.uint32]:
    rows = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        rows.append(byte)
    return np.array(rows, dtype=np.uint32)


_TABLE = _table()
_ROWS = _TABLE.tolist()


def masked_crc(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _ROWS[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def starts_a_record(header: bytes) -> bool:
    """Whether a file that starts so is a TFRecord file."""
    return len(header) >= 12 and masked_crc(header[:8]) == _HEADER.unpack_from(header)[1]


def chunks(source: Source) -> Iterator[Chunk]:
    """All whole records; a last one that is cut, as a live run leaves it, is left out."""
    rest, offset, skip = b"", 0, 0
    sound: set[bytes] = set()
    for piece in source.chunks(_CHUNK):
        data, at = rest + piece, min(skip, len(rest) + len(piece))
        skip -= at
        starts, ends = [], []
        while len(data) - at >= 12 and not skip:
            header = data[at : at + 12]
            if header not in sound:
                if not starts_a_record(header):
                    raise damaged(source, offset + at)
                if len(sound) > 10_000:
                    sound.clear()
                sound.add(header)
            length = _HEADER.unpack(header)[0]
            end = at + 16 + length
            if length > _LONGEST_KEPT:
                skip, at = max(end - len(data), 0), min(end, len(data))
                continue
            if end > len(data):
                break
            starts.append(at + 12)
            ends.append(end - 4)
            at = end
        chunk = Chunk(offset, data, starts, ends)
        _check_contents(source, chunk)
        yield chunk
        rest, offset = data[at:], offset + at


def damaged(source: Source, at: int) -> DataError:
    return source.error(f"the record at byte {at} is damaged: copy the file again")


def _check_contents(source: Source, chunk: Chunk) -> None:
    """Checksums of all records at once, a byte at a time: longest first, so that those left are a prefix."""
    starts_N, ends_N = np.array(chunk.starts, np.int64), np.array(chunk.ends, np.int64)
    lengths_N = ends_N - starts_N
    order_N = np.argsort(-lengths_N, kind="stable")
    order_N = order_N[lengths_N[order_N] <= LONGEST_CHECKED]
    if not len(order_N):
        return
    starts_N, ends_N, lengths_N = starts_N[order_N], ends_N[order_N], lengths_N[order_N]
    bytes_ = np.frombuffer(chunk.data, np.uint8)
    crc_N = np.full(len(order_N), 0xFFFFFFFF, np.uint32)
    # How many records have more than this many bytes.
    going_on = np.searchsorted(-lengths_N, -np.arange(int(lengths_N[0])), side="left")
    for position, count in enumerate(going_on.tolist()):
        head = crc_N[:count]
        crc_N[:count] = _TABLE[(head ^ bytes_[starts_N[:count] + position]) & 0xFF] ^ head >> 8
    crc_N = ~crc_N
    masked_N = (crc_N >> 15 | crc_N << 17) + np.uint32(0xA282EAD8)
    stored_N = np.zeros(len(order_N), np.uint32)
    for position in range(4):
        stored_N |= bytes_[ends_N + position].astype(np.uint32) << np.uint32(8 * position)
    wrong = np.flatnonzero(masked_N != stored_N)
    if len(wrong):
        raise damaged(source, chunk.offset + int(starts_N[wrong].min()) - 12)


class WireError(ValueError):
    """Bytes that are no message."""


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise WireError("a number has no end")


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def scalars(data: bytes, at: int, end: int, plugins: dict[str, str]) -> tuple[int, list[tuple[str, float]]]:
    """`plugins` remembers what a tag is for: writers say it with a tag's first value only."""
    event = _message(data[at:end])
    steps = [step for step in event.get(2, []) if isinstance(step, int)]
    tagged = []
    for value in map(_message, _inner(event, 5, 1)):
        tag = _name(_inner(value, 1))
        plugin = _name(_inner(value, 9, 1, 1))
        # Bounded, because nothing says that a tag will ever be a scalar.
        if plugin and tag and len(plugins) < 100_000:
            plugins.setdefault(tag, plugin)
        number = _element("<f", _inner(value, 2))
        if number is None and plugins.get(tag) == "scalars":
            number = next(map(_one_element, _inner(value, 8)), None)
        if number is not None:
            tagged.append((tag, number))
    return signed(steps[-1]) if steps else 0, tagged


def _message(data: bytes) -> Message:
    """The values of each field: numbers, and bytes for all that is not a varint."""
    fields: Message = {}
    at, end = 0, len(data)
    while at < end:
        key, at = varint(data, at, end)
        kind = key & 7
        values = fields.setdefault(key >> 3, [])
        if kind == 0:
            value, at = varint(data, at, end)
            values.append(value)
            continue
        if kind == 2:
            length, at = varint(data, at, end)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise WireError(f"unknown kind {kind}")
        if at + length > end:
            raise WireError("a field is longer than its message")
        values.append(data[at : at + length])
        at += length
    return fields


def _inner(message: Message, field: int, *below: int) -> list[bytes]:
    """The bytes in a field, or in the fields of the messages in it."""
    messages = [value for value in message.get(field, []) if isinstance(value, bytes)]
    return [part for value in messages for part in _inner(_message(value), *below)] if below else messages


def _one_element(data: bytes) -> float | None:
    """A tensor's only element: as raw content, or in the list of its type, packed or not."""
    tensor = _message(data)
    kinds = [_CONTENT[kind] for kind in tensor.get(1, []) if isinstance(kind, int) and kind in _CONTENT]
    for layout, field in (*((kind, 4) for kind in kinds), ("<f", 5), ("<d", 6)):
        number = _element(layout, _inner(tensor, field))
        if number is not None:
            return number
    for value in (*tensor.get(7, []), *tensor.get(10, [])):
        whole, rest = (value, 0) if isinstance(value, int) else varint(value, 0, len(value))
        if isinstance(value, int) or rest == len(value):
            return float(signed(whole))
    return None


def _element(layout: str, contents: list[bytes]) -> float | None:
    content = contents[-1] if contents else b""
    return float(struct.unpack(layout, content)[0]) if len(content) == struct.calcsize(layout) else None


def _name(contents: list[bytes]) -> str:
    try:
        return contents[-1].decode() if contents else ""
    except UnicodeDecodeError as error:
        raise WireError("a name is not UTF-8") from error


def is_event_file(name: str) -> bool:
    # Beside events, profilers leave files of their own.
    return "tfevents" in name and not name.endswith(".profile-empty")


def event_files(directory: Path) -> list[Path]:
    """Event files of one run, oldest first: in the directory itself, or in the only one below with some."""
    events_by_folder: dict[Path, list[str]] = {}
    seen = 0
    for place, folders, names in os.walk(directory):
        folders.sort()
        events = [name for name in names if is_event_file(name)]
        if events:
            events_by_folder[Path(place)] = events
            if Path(place) == directory:
                break
        seen += len(names) + len(folders)
        if seen > _MAX_FILES:
            raise DataError(
                f"{directory}: more than {_MAX_FILES} files: give the directory with the event files"
            )
    if len(events_by_folder) > 1:
        shown = ", ".join(str(folder.relative_to(directory)) for folder in list(events_by_folder)[:5])
        raise DataError(f"{directory}: event files of more than one run: give one of {shown}")
    return [folder / name for folder, files in events_by_folder.items() for name in sorted(files, key=_age)]


def _age(name: str) -> tuple[int, str]:
    stamp = _STAMP.search(name)
    return (int(stamp[1]) if stamp else 0, name)


def read_tensorboard(path: Path) -> RunLog:
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
    return RunLog(path=path, format="TensorBoard events", metrics=metrics, sha256=digests, notes=tuple(notes))


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
    """The bytes between step and value of an event with one plain scalar."""
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
