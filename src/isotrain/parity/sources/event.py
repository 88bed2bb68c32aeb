"""One TensorBoard event in protobuf's wire format: its step and its scalars."""

from __future__ import annotations

import struct

# How one element is stored, by TensorFlow's numbers for types.
_CONTENT = {1: "<f", 2: "<d", 3: "<i", 9: "<q", 19: "<e"}

Message = dict[int, list[int | bytes]]


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
    found = []
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
            found.append((tag, number))
    return signed(steps[-1]) if steps else 0, found


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
    found = [value for value in message.get(field, []) if isinstance(value, bytes)]
    return [part for value in found for part in _inner(_message(value), *below)] if below else found


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
