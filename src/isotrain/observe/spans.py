"""Who does what when in a profiled step: each worker's spans, and the files that keep them."""

from __future__ import annotations

import json
import platform
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from isotrain.errors import DataError
from isotrain.files import parse_json, read_regular
from isotrain.observe.run_directory import LARGEST_JSON, RunDirectory, write_atomically

P = ParamSpec("P")
Result = TypeVar("Result")
Owner = TypeVar("Owner", bound="HasSpans")

# Spans of one name that a worker keeps of a step: with more, the shortest pauses between them are left out.
MOST_SPANS = 32
STEP = "step"
"""The span of a whole step, of whoever leads it."""


class Span(NamedTuple):
    """What one worker did from `start` to `end`, in seconds of its machine's clock."""

    name: str
    worker: str
    host: str
    start: float
    end: float


class SpanLog:
    """One process's spans, recorded between `begin` and `take`; without `on`, never.

    What is under way at either moment counts from `begin`, or up to `take`. For several threads.
    """

    def __init__(self, worker: str, on: bool = False) -> None:
        self.worker, self.on = worker, on
        self._host = platform.node()
        self._lock = threading.Lock()
        self._numbers = count()
        self._begun: float | None = None
        self._open: dict[int, tuple[str, str, float]] = {}
        self._done: list[Span] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        number = self.open(name)
        try:
            yield
        finally:
            self.close(number)

    def open(self, name: str, worker: str = "") -> int:
        """Begin a span, of another `worker` where this process watches one; returns what `close` takes."""
        number = next(self._numbers)
        if self.on:
            with self._lock:
                self._open[number] = (name, worker or self.worker, time.time())
        return number

    def close(self, number: int) -> None:
        if not self.on:
            return
        with self._lock:
            name, worker, start = self._open.pop(number)
            if self._begun is not None:
                self._done.append(Span(name, worker, self._host, max(start, self._begun), time.time()))

    def begin(self) -> None:
        with self._lock:
            self._begun, self._done = time.time(), []

    def take(self) -> list[Span]:
        """The spans since `begin`, joined where they overlap, and the one of all that time.

        Nothing without `begin`, as in a worker that took the place of another since.
        """
        with self._lock:
            now, begun = time.time(), self._begun
            if begun is None:
                return []
            under_way = [
                Span(name, worker, self._host, max(start, begun), now)
                for name, worker, start in self._open.values()
            ]
            whole = Span(STEP, self.worker, self._host, begun, now)
            spans, self._done, self._begun = self._done + under_way, [], None
        return [whole, *joined(spans)]


class HasSpans(Protocol):
    spans: SpanLog


def spanned(
    name: str,
) -> Callable[[Callable[Concatenate[Owner, P], Result]], Callable[Concatenate[Owner, P], Result]]:
    """A method that is a span of its object's log."""

    def decorate(method: Callable[Concatenate[Owner, P], Result]) -> Callable[Concatenate[Owner, P], Result]:
        @wraps(method)
        def run(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> Result:
            with self.spans.span(name):
                return method(self, *args, **kwargs)

        return run

    return decorate


def joined(spans: Iterable[Span]) -> list[Span]:
    """Overlapping spans of one name as one, and `MOST_SPANS` of each name and worker at most."""
    groups: dict[tuple[str, str, str], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        group = groups[span[:3]]
        if group and span.start <= group[-1].end:
            group[-1] = group[-1]._replace(end=max(group[-1].end, span.end))
        else:
            group.append(span)
    for group in groups.values():
        while len(group) > MOST_SPANS:
            index = min(range(1, len(group)), key=lambda i: group[i].start - group[i - 1].end)
            group[index - 1 : index + 1] = [group[index - 1]._replace(end=group[index].end)]
    return sorted((span for group in groups.values() for span in group), key=lambda span: span.start)


def rank_name(rank: int) -> str:
    return f"training rank {rank}"


def profile_directory(run: RunDirectory, step: int) -> Path:
    return run.profile / f"step-{step:06d}"


def write_spans(run: RunDirectory, step: int, writer: str, spans: Iterable[Span]) -> str | None:
    """`writer` names the file: ranks that have no controller write one each. Returns why it could not."""
    directory = profile_directory(run, step)
    lines = [json.dumps({"step": step, **span._asdict()}) + "\n" for span in spans]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / f"spans-{writer}.jsonl", "".join(lines))
    except OSError as error:
        return f"no profile of step {step}: {error}"
    return None


def read_spans(run: RunDirectory) -> dict[int, list[Span]]:
    """The spans of each profiled step, in order."""
    steps: dict[int, list[Span]] = defaultdict(list)
    for file in sorted(run.profile.glob("step-*/spans-*.jsonl")):
        try:
            rows = [parse_json(line) for line in read_regular(file, LARGEST_JSON).splitlines()]
            for row in rows:
                times = float(row["start"]), float(row["end"])
                names = str(row["name"]), str(row["worker"]), str(row["host"])
                steps[int(row["step"])].append(Span(*names, *times))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file} has no spans of a profiled step ({error!r}); remove it") from error
    return dict(sorted(steps.items()))
