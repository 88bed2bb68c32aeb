"""Methods that yield: a worker's items one by one, as soon as each is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray import ObjectRefGenerator

from isotrain.cluster.watch import Watch
from isotrain.cluster.workers import Call, WorkerGroup


@dataclass(frozen=True, eq=False)
class Stream:
    """A method that yields, running on one worker."""

    index: int
    method: str
    items: ObjectRefGenerator


def open_stream(group: WorkerGroup, index: int, method: str, *args: Any) -> Stream:
    return Stream(index, method, group.stream(method, index, *args))


def next_item(group: WorkerGroup, stream: Stream) -> Any:
    """The next item, waiting for it; StopIteration after the last. Errors are those of `group.results`."""
    return group.value(stream.index, stream.method, next(stream.items))


def wait_any(watch: Watch, works: Sequence[Call | Stream], deadline: float | None = None) -> list[int]:
    """Indices of streams that have an item, have ended or have failed: at least one unless time runs out."""
    refs = [work.items if isinstance(work, Stream) else work.ref for work in works]
    found = {id(ref) for ref in watch.wait(refs, deadline, fetch_local=False)}
    return [number for number, ref in enumerate(refs) if id(ref) in found]
