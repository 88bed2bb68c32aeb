"""One TensorBoard event in protobuf's wire format: its step and its scalars."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")
# TensorFlow's numbers for types, with how one element is stored.
_CONTENT = {
    1: struct.Struct("<f"),
    2: struct.Struct("<d"),
    3: struct.Struct("<i"),
    9: struct.Struct("<q"),
    19: struct.Struct("<e"),
}
_LONGEST_SCALAR = 16


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
    step = 0
    found: list[tuple[str, float]] = []
    for field, kind, value, start in _fields(data, at, end):
        if field == 2 and kind == _VARINT:
            step = signed(value)
        elif field == 5 and kind == _BYTES:
            for inner, inner_kind, inner_end, inner_start in _fields(data, start, value):
                if inner == 1 and inner_kind == _BYTES:
                    scalar = _summary_value(data, inner_start, inner_end, plugins)
                    if scalar is not None:
                        found.append(scalar)
    return step, found


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, kind, value and start of each field; the value of bytes is where they end."""
    while at < end:
        key, at = varint(data, at, end)
        kind = key & 7
        if kind == _VARINT:
            start = at
            value, at = varint(data, at, end)
            yield key >> 3, kind, value, start
            continue
        start = at
        if kind == _BYTES:
            length, start = varint(data, at, end)
            at = start + length
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise WireError(f"unknown kind {kind}")
        if at > end:
            raise WireError("a field is longer than its message")
        yield key >> 3, kind, at, start


def _summary_value(data: bytes, at: int, end: int, plugins: dict[str, str]) -> tuple[str, float] | None:
    tag, number, tensor = "", None, None
    for field, kind, stop, start in _fields(data, at, end):
        if field == 1 and kind == _BYTES:
            tag = _string(data[start:stop])
        elif field == 2 and kind == _FIXED32:
            number = float(_FLOAT.unpack_from(data, start)[0])
        elif field == 8 and kind == _BYTES:
            tensor = (start, stop)
        elif field == 9 and kind == _BYTES:
            plugin = _plugin(data, start, stop)
            # Bounded, because nothing says that a tag will ever be a scalar.
            if plugin and tag and len(plugins) < 100_000:
                plugins.setdefault(tag, plugin)
    if number is None and tensor and plugins.get(tag) == "scalars":
        number = _one_element(data, *tensor)
    return (tag, number) if number is not None else None


def _plugin(data: bytes, at: int, end: int) -> str:
    for field, kind, stop, start in _fields(data, at, end):
        if field == 1 and kind == _BYTES:
            for inner, inner_kind, inner_stop, inner_start in _fields(data, start, stop):
                if inner == 1 and inner_kind == _BYTES:
                    return _string(data[inner_start:inner_stop])
    return ""


def _one_element(data: bytes, at: int, end: int) -> float | None:
    """A tensor's only element: as raw content, or in the list of its type, packed or not."""
    dtype, raw, number = 0, b"", None
    for field, kind, stop, start in _fields(data, at, end):
        if field == 1 and kind == _VARINT:
            dtype = stop
        elif field == 4 and kind == _BYTES:
            raw = data[start : min(stop, start + _LONGEST_SCALAR)]
        elif field == 5 and stop - start == 4:
            number = float(_FLOAT.unpack_from(data, start)[0])
        elif field == 6 and stop - start == 8:
            number = float(_DOUBLE.unpack_from(data, start)[0])
        elif field in (7, 10) and kind == _VARINT:
            number = float(signed(stop))
        elif field in (7, 10) and kind == _BYTES:
            value, after = varint(data, start, stop)
            number = float(signed(value)) if after == stop else None
    layout = _CONTENT.get(dtype)
    if raw and layout and len(raw) == layout.size:
        return float(layout.unpack(raw)[0])
    return number


def _string(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise WireError("a name is not UTF-8") from error
