"""Which steps are followed by a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

# What a run without `trainer.save_every` loses at most when it dies.
MINUTES = 10.0
# A save that holds training up for longer than this share of the time between two is done less often.
LARGEST_SHARE = 0.05


class SaveSchedule:
    """Every so many steps; by the clock if `every` is None; always after the last step.

    A step takes a second or an hour: only the clock can promise how much is lost. Which steps are saved then
    differs from run to run; a checkpoint changes no number, so what is trained does not. Clocks differ
    between ranks as well: one decides for all.
    """

    def __init__(self, every: int | None, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.every, self.steps, self._clock = every, steps, clock
        self._last, self._pause = clock(), 60 * MINUTES

    def is_due(self, step: int) -> bool:
        if step == self.steps:
            return True
        if self.every is None:
            return self._clock() - self._last >= self._pause
        return self.every > 0 and step % self.every == 0

    def saved(self, seconds: float) -> None:
        """A save is done, and training waited so long for it."""
        self._last, self._pause = self._clock(), max(60 * MINUTES, seconds / LARGEST_SHARE)
