"""Directories that end with the process that made them, or with the next one that looks for them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path


def make_held(root: Path, prefix: str) -> Path:
    """A new directory that only this user can enter, locked until this process ends, however it ends."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))  # mode 0700
    lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return path


def remove_abandoned(root: Path, prefix: str, age: float = 60.0) -> None:
    """Remove what killed processes of this user left that had made it with `make_held`."""
    for path in root.glob(prefix + "*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                # A young one may not be locked yet by the process that is making it.
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > age:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
