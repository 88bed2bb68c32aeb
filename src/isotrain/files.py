"""Files of run directories, which may come from somebody else: regular files only, and JSON within bounds."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

# Deeper JSON is nothing that isotrain writes, and would end the recursive code that reads it.
DEEPEST_JSON = 100


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read; an OSError for a pipe, device or directory, also behind a link.

    A named pipe would be waited for, and a device such as /dev/zero has no end.
    """
    return open(path, "rb", opener=lambda name, flags: _open(name, flags))


def read_regular(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """All of a file, of at most `most` bytes: an OSError if it is larger."""
    with open_regular(path) as file:
        data = file.read(-1 if most is None else most + 1)
    if most is not None and len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", os.fspath(path))
    return data


def open_own(path: str | os.PathLike[str], mode: str) -> BinaryIO:
    """Open a file of a run directory to write (`wb`) or to append (`ab`), unbuffered; it is made if missing.

    A run directory may have been received: a link in it would lead the writer to any file of this user.
    """
    assert mode in ("wb", "ab"), mode
    # What is there is looked at before it is emptied.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_APPEND if mode == "ab" else 0)
    file = os.fdopen(_open(os.fspath(path), flags), mode, buffering=0)
    if mode == "wb":
        file.truncate(0)
    return cast(BinaryIO, file)


def _open(name: str, flags: int) -> int:
    try:
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "a link, which is not followed; remove it", name) from error
        if error.errno == errno.ENXIO:  # a named pipe that nobody reads, or a socket
            raise OSError(errno.ENXIO, "not a regular file", name) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return descriptor


def parse_json(data: bytes | str, *, constants: Callable[[str], Any] | None = None) -> Any:
    """The content of JSON text; a ValueError for anything else, also where it is nested too deeply.

    `constants` is called with `NaN`, `Infinity` and `-Infinity`, which Python would accept.
    """
    try:
        content = json.loads(data, parse_constant=constants)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    # Mostly there are too few brackets for it, which is known without a walk through the content.
    if isinstance(data, str):
        brackets = data.count("[") + data.count("{")
    else:
        brackets = data.count(b"[") + data.count(b"{")
    if brackets > DEEPEST_JSON:
        _check_depth(content)
    return content


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(DEEPEST_JSON + 1):
        nested = [container for container in level if isinstance(container, dict | list)]
        if not nested:
            return
        level = [
            inner
            for container in nested
            for inner in (container.values() if isinstance(container, dict) else container)
        ]
    raise ValueError(f"nested more than {DEEPEST_JSON} levels deep")


def is_link_out(path: Path, directory: Path) -> bool:
    """Whether a file of a directory is really somewhere else, by a link on the way to it."""
    try:
        return not path.resolve().is_relative_to(directory.resolve())
    except (OSError, RuntimeError):  # a loop
        return True
