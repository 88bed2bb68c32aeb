"""Which process listens on a port of this host, as the kernel tells it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"


def listens(port: int, group: int) -> bool | None:
    """Whether a process of this group listens on the port; None while nobody does.

    Loopback is open to every user of the host: one of them may have taken a port that was free a moment ago.
    """
    sockets = set(_listening_sockets(port))
    if not sockets:
        return None
    return any(sockets & _sockets(pid) for pid in _members(group))


def _listening_sockets(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):  # of a kernel without IPv6
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                    yield f"socket:[{inode}]"


def _members(group: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(int(entry.name)) == group:
                    yield int(entry.name)


def _sockets(pid: int) -> set[str]:
    sockets = set()
    # It may end meanwhile; one of another user cannot be looked into, and is not ours.
    with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(descriptor))
    return sockets
