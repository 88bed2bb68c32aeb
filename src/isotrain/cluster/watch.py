"""Wait for some workers while watching others that must stay alive."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

LOOK_EVERY = 5.0


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
        """Those that are there, at least one unless the time is over; `but` is a look that is left out."""
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
