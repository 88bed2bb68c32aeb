"""Files from strangers: read once, from start to end, within stated bounds, with their digest."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isotrain.errors import DataError
from isotrain.files import is_link_out, open_regular, parse_json

MAX_BYTES = 2 << 30
MAX_LINE = 4 << 20
_CHUNK = 1 << 20

# numpy 2 prints the type of a scalar too, torch always does.
_WRAPPED = re.compile(
    r"(?:np\.|numpy\.)?(?:float|int|uint|bool)\d*_?\(([^()]*)\)|tensor\(([^(),]*)(?:,[^()]*)?\)"
)
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_WORDS = {"True": 1.0, "False": 0.0}
_LONGEST = 200
# A float counts whole numbers without gaps up to here.
_EXACT = 2**53


class Source:
    """One file of a run. Its digest is of the bytes that were read, also while a live run appends to it."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or path.name
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> dict[str, str]:
        return {self.name: self._digest.hexdigest()}

    def error(self, reason: str, line: int | None = None) -> DataError:
        return DataError(f"{self.path}, line {line}: {reason}" if line else f"{self.path}: {reason}")

    def chunks(self, size: int = _CHUNK) -> Iterator[bytes]:
        self._digest = hashlib.sha256()
        left = MAX_BYTES
        try:
            with open_regular(self.path) as file:
                facts = os.fstat(file.fileno())
                while chunk := file.read(size):
                    left -= len(chunk)
                    if left < 0 or facts.st_size > MAX_BYTES:
                        raise self.error(
                            f"larger than {MAX_BYTES >> 30} GiB: cut out the lines of the metrics"
                        )
                    self._digest.update(chunk)
                    yield chunk
        except (OSError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            reason = getattr(error, "strerror", None) or error
            raise self.error(f"cannot be read ({reason})") from error

    def whole(self, longest: int) -> bytes:
        """All of it, of at most `longest` bytes."""
        pieces, size = [], 0
        for chunk in self.chunks():
            pieces.append(chunk)
            size += len(chunk)
            if size > longest:
                raise self.error(f"larger than {longest} bytes")
        return b"".join(pieces)

    def json_object(self, longest: int) -> dict[str, Any]:
        data = self.whole(longest)
        try:
            content = parse_json(data.decode())
        except ValueError as error:
            raise self.error(f"not JSON ({clipped(str(error))})") from error
        if not isinstance(content, dict):
            raise self.error("not a JSON object")
        return content

    def lines(self) -> Iterator[tuple[int, bytes, bool]]:
        """Number, content and whether its newline was there; a line beyond the bound is an error."""
        number, rest = 1, b""
        for chunk in self.chunks():
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield number, line, True
                number += 1
            if len(rest) > MAX_LINE:
                raise self.error(f"longer than {MAX_LINE >> 20} MiB", number)
        if rest:
            yield number, rest, False

    def console_lines(self) -> Iterator[tuple[int, bytes, bool]]:
        """As `lines`, with a progress bar's carriage returns ending lines too and overlong ones left out."""
        number, rest, skipping = 1, b"", False
        for chunk in self.chunks():
            *whole, tail = (rest + chunk).split(b"\n")
            for line in whole:
                for piece in line.split(b"\r")[skipping:]:
                    yield number, piece, True
                number, skipping = number + 1, False
            *pieces, rest = tail.split(b"\r")
            for piece in pieces[skipping:]:
                yield number, piece, True
            skipping = skipping and not pieces
            if len(rest) > MAX_LINE or skipping:
                rest, skipping = b"", True
        if rest:
            yield number, rest, False


def inside(directory: Path, name: str) -> Path:
    """A file of a directory from a stranger, whose links must not lead out of it."""
    path = directory / name
    if is_link_out(path, directory):
        raise DataError(f"{path}: a link that leads out of the run's directory")
    return path


def sha256_of(directory: Path, name: str) -> str:
    """SHA-256 of a file of such a directory."""
    source = Source(inside(directory, name), name)
    for _ in source.chunks():
        pass
    return source.sha256[name]


def clipped(text: str, length: int = 60) -> str:
    """Content of a file as an error may show it: no control characters, not long."""
    return repr(text if len(text) <= length else text[:length] + "...")


def number(text: str) -> float | None:
    """The value, NaN and infinities included; None for what is not a number."""
    if len(text) > _LONGEST or "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    wrapped = _WRAPPED.fullmatch(text)
    return number(wrapped[1] or wrapped[2] or "") if wrapped else None


def whole_number(value: object) -> int | None:
    """A step from text or JSON; `3.0` is one, because tables with gaps are written so; `3.5` is not."""
    if isinstance(value, str):
        value = value.strip()
        value = int(value) if _WHOLE.fullmatch(value) else number(value)
    if isinstance(value, float):
        value = int(value) if abs(value) <= _EXACT and value.is_integer() else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -(2**63) <= value < 2**63 else None
