"""Child processes, threads and temporary directories that do not outlive the process that made them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def module_arguments(module: str, *arguments: str) -> tuple[str, ...]:
    """For this Python. Never the working directory first: a file json.py there is not meant for isotrain."""
    safe_path = ("-P",) if sys.version_info >= (3, 11) else ()
    return (*safe_path, "-m", module, *arguments)


def module_command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, *module_arguments(module, *arguments)]


def in_background(work: Callable[[], T]) -> Future[T]:
    """Begin it. Not in an executor: one that waits for a process must not keep the program from ending."""
    future: Future[T] = Future()

    def fulfil() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=fulfil, daemon=True).start()
    return future


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Linux ends this process with the thread that started it; `parent` is its process, if known."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)  # it was killed while this process was still starting


def make_held(root: Path, prefix: str) -> Path:
    """A new directory that only this user can enter, locked until this process ends, however it ends."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))  # mode 0700
    lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return path


def is_held(path: Path) -> bool:
    """Whether a process that made a directory with `make_held` still lives."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


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
