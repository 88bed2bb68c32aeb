"""TFRecord framing: length, checksum of the length, content, checksum of the content.

Both checksums are CRC32C, rotated and shifted as TensorFlow does it, so that checksums of checksums differ.
N: records of a chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isotrain.errors import DataError
from isotrain.parity.sources.bounded import Source

_HEADER = struct.Struct("<QI")
_CHUNK = 4 << 20
# Longer ones hold images and the like, which are passed over.
LONGEST_CHECKED = 4096
_LONGEST_KEPT = 8 << 20


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
