"""Waiting for the replies of many workers, and telling the cause where one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import ray

from isotrain.cluster.failures import WorkerDied
from isotrain.errors import ClusterError, IsotrainError, WorkerFailed

LOOK_EVERY = 5.0
# The first failure seen need not be the cause: a rank whose peer is killed loses its connections.
GRACE = 2.0

K = TypeVar("K")


class Watch:
    """Looks that are taken every few seconds while somebody waits, however often that one gets something.

    A look raises where it makes no sense to wait any longer. It is one question to the cluster's head, so
    it takes no more of the controller with a thousand ranks than with one.
    """

    def __init__(self) -> None:
        self._looks: list[Callable[[], None]] = []
        self._last = time.monotonic()

    def add(self, look: Callable[[], None]) -> None:
        self._looks.append(look)

    def wait(
        self,
        refs: Sequence[Any],
        deadline: float | None = None,
        *,
        fetch_local: bool = True,
        but: Callable[[], None] | None = None,
    ) -> list[Any]:
        """References that are ready, at least one unless the deadline passes; the check `but` is left out."""
        while True:
            self._look(but)
            left = LOOK_EVERY if deadline is None else min(LOOK_EVERY, max(0.0, deadline - time.monotonic()))
            first, _ = ray.wait(list(refs), num_returns=1, timeout=left, fetch_local=fetch_local)
            if first:
                break
            if deadline is not None and time.monotonic() >= deadline:
                return []
        # All that are there by now, in one go: a thousand workers answer in far fewer than a thousand turns.
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=fetch_local)
        return list(ready or first)

    def _look(self, but: Callable[[], None] | None) -> None:
        if time.monotonic() - self._last < LOOK_EVERY:
            return
        for look in self._looks:
            if look != but:
                look()
        self._last = time.monotonic()


@dataclass
class Gathered(Generic[K]):
    """Results of calls: values by what was called, failures, and those that did not reply in time."""

    values: dict[K, Any] = field(default_factory=dict)
    failures: list[IsotrainError] = field(default_factory=list)
    late: list[K] = field(default_factory=list)


def gather(
    calls: Mapping[Any, K],
    explain: Callable[[K, Exception], IsotrainError],
    watch: Watch,
    timeout: float | None = None,
    *,
    grace: float = 0.0,
    but: Callable[[], None] | None = None,
) -> Gathered[K]:
    """Wait for calls, which are given by their references, until all have replied or one has failed.

    After a failure that may be an effect of another one, that one is waited for through `grace` seconds.
    """
    pending, gathered = dict(calls), Gathered[K]()
    deadline = None if timeout is None else time.monotonic() + timeout
    while pending and (ready := watch.wait(list(pending), deadline, but=but)):
        ended = [pending.pop(ref) for ref in ready]
        try:
            gathered.values.update(zip(ended, ray.get(ready), strict=True))
        except Exception:
            gathered.failures += _failures(dict(zip(ready, ended, strict=True)), explain)
            if not all(map(may_be_an_effect, gathered.failures)):
                return gathered
            end = time.monotonic() + grace
            deadline = end if deadline is None else min(deadline, end)
    gathered.late = list(pending.values())
    return gathered


def _failures(
    ended: Mapping[Any, K], explain: Callable[[K, Exception], IsotrainError]
) -> list[IsotrainError]:
    failures = []
    for ref, key in ended.items():
        try:
            ray.get(ref)
        except Exception as error:
            failures.append(explain(key, error))
    return failures


def may_be_an_effect(failure: IsotrainError) -> bool:
    """Whether another member's end may have caused this: not if a worker says what is wrong."""
    return isinstance(failure, ClusterError) and not isinstance(failure, WorkerFailed)


def cause_of(failures: Sequence[IsotrainError]) -> IsotrainError:
    """Errors of ours explain most, then the end of a process; lost connections follow from either."""

    def order(failure: IsotrainError) -> int:
        return 0 if not may_be_an_effect(failure) else 1 if isinstance(failure, WorkerDied) else 2

    return min(failures, key=order)
