"""The Ray actor around a worker: a plain object whose class knows nothing of Ray."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

from isotrain.children import die_with_parent
from isotrain.errors import ClusterError, IsotrainError, may_pass


@dataclass(frozen=True)
class Location:
    """Where a worker runs."""

    pid: int
    node: str
    host: str
    errors: str
    """The file of its standard error, on its own machine; empty when there is none."""


class Crash(Exception):
    """The traceback of an error that is not one of ours; the error itself may not survive pickling."""


class Bug(Crash):
    """The same of an error that would come again."""


class WorkerHost:
    def __init__(self) -> None:
        # Here: it takes the main thread, which runs no method of a worker that runs several at a time.
        _leave_sigterm_to_the_controller()

    def start(self, directory: str, worker: type, *args: Any, **kwargs: Any) -> Location:
        # Ray asks a worker whose node has ended to end itself, which one deep in a computation hears late.
        die_with_parent()
        # Paths in a recipe are relative to where the user is, on every machine.
        try:
            os.chdir(directory)
        except OSError as error:
            raise ClusterError(
                f"{directory} is not on every machine of the cluster ({error.strerror}); start in a "
                "directory that all machines share, with the model and the data"
            ) from error
        # Not in the constructor: errors there reach the controller as an actor's death, without their type.
        self._worker = self._guarded(worker, *args, **kwargs)
        context = ray.get_runtime_context()
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return Location(os.getpid(), context.get_node_id(), host, _errors_file())

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._guarded(getattr(self._worker, method), *args, **kwargs)

    def stream(self, method: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        items = iter(self._guarded(getattr(self._worker, method), *args, **kwargs))
        end = object()
        while (item := self._guarded(next, items, end)) is not end:
            yield item

    def _guarded(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except IsotrainError:
            raise
        except (Exception, SystemExit) as error:
            # From the worker's own frames on: ours and Ray's explain nothing.
            frames = error.__traceback__.tb_next if error.__traceback__ else None
            lines = traceback.format_exception(type(error), error, frames)
            raise (Crash if may_pass(error) else Bug)("".join(lines).rstrip()) from None


def _leave_sigterm_to_the_controller() -> None:
    """One that every process of a job gets must not end the workers before a checkpoint is saved."""
    if threading.current_thread() is threading.main_thread():
        # A function, because processes that a worker starts would ignore SIGTERM as well.
        signal.signal(signal.SIGTERM, lambda *_: None)


def _errors_file() -> str:
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if os.path.isfile(path) else ""
