"""Errors of workers, from what Ray reports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.exceptions import OutOfMemoryError as RayOutOfMemory

from isotrain.cluster.host import Bug, Crash, Location
from isotrain.errors import ClusterError, IsotrainError, WorkerFailed, WorkerLost

DEATHS = (RayActorError, NodeDiedError, ObjectLostError, RayOutOfMemory, WorkerCrashedError)
LAST_LINES = 15
LAST_BYTES = 1 << 16


class WorkerDied(WorkerLost):
    """A worker whose process has ended; `index` is its number in its group."""

    def __init__(self, message: str, index: int = -1) -> None:
        super().__init__(message, index)
        self.message, self.index = message, index

    def __str__(self) -> str:
        return self.message


class Overdue(WorkerLost):
    """A worker that did not reply within its timeout."""


def explain(error: Exception, who: str, index: int, method: str, where: Location | None) -> IsotrainError:
    """The error to raise for what `ray.get` raised."""
    # With an error of ours, Ray raises a mixture of it and its own: only the original has a readable message.
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, IsotrainError):
        return cause
    place = f"{who} {_placed(index, where)}"
    if isinstance(cause, Crash):
        kind = WorkerFailed if isinstance(cause, Bug) else WorkerLost
        return kind(f"{place} failed in `{method}`:\n{cause}")
    if isinstance(cause, ActorUnschedulableError):
        return ClusterError(f"{place} cannot be started: {cause}")
    if isinstance(cause, DEATHS):
        during = f" during `{method}`" if method else ""
        return WorkerDied(f"{place} died{during}: {_reason(cause)}{_last_words(where)}", index)
    return WorkerLost(f"{place} failed in `{method}`: {cause}")


def overdue(who: str, method: str, timeout: float | None, places: Mapping[int, Location | None]) -> Overdue:
    """`places`: of those who are late, by their numbers."""
    names = ", ".join(_placed(index, where) for index, where in places.items())
    return Overdue(f"{who}: no reply to `{method}` within {timeout:g} s from {names}")


def _placed(index: int, where: Location | None) -> str:
    return f"{index}" + (f" on {where.host} (pid {where.pid})" if where else "")


def _reason(error: Exception) -> str:
    """The one sentence of Ray's report that tells how the process ended."""
    text = " ".join(str(error).split())
    if "connection error code 2. End of file" in text:
        return "its process ended unexpectedly: killed, perhaps for lack of memory (see dmesg), or crashed"
    detail = re.search(r"Worker exit detail: (.+?)(?: Some common causes| There are some|$)", text)
    return detail.group(1) if detail else text


def _last_words(where: Location | None) -> str:
    if where is None or not where.errors:
        return ""
    if not ray.is_initialized() or where.node != ray.get_runtime_context().get_node_id():
        return f"\nits output is in {where.errors} on {where.host}"
    try:
        lines = tail(Path(where.errors))
    except OSError:
        return ""
    # Ray writes marks for its own use into these files.
    said = [line for line in lines if line.strip() and not line.startswith(":")]
    return "\nits last output:\n" + "\n".join(f"  {line}" for line in said[-LAST_LINES:]) if said else ""


def tail(path: Path) -> list[str]:
    """The last lines of a file that may be of any size; the first of them may lack its beginning."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        return file.read(LAST_BYTES).decode(errors="replace").splitlines()
