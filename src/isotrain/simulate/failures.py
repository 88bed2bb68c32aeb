"""What failures of devices cost: how many an hour, and the share of time that they take."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Failures:
    """`hours_between`: mean time between failures of one device, with its part of machine and network."""

    hours_between: float
    restart_seconds: float
    """From a failure of a rank to the first new step."""
    engine_seconds: float = 0.0
    """That one engine is away after a failure; the run goes on."""

    def an_hour(self, devices: int) -> float:
        return devices / self.hours_between

    def lost_share(self, ranks: int, save_every: float, save_seconds: float) -> float:
        """Of the run's time, for steps done again, restarts and saving; 1 if it does not get anywhere."""
        between = 3600.0 / self.an_hour(ranks)
        again = self.restart_seconds + (save_every + save_seconds) / 2
        return min(1.0, save_seconds / (save_every + save_seconds) + again / between)

    def best_interval(self, ranks: int, save_seconds: float) -> float:
        """Seconds between checkpoints that lose least (Young's formula)."""
        return math.sqrt(2.0 * save_seconds * 3600.0 / self.an_hour(ranks))

    def engines_away(self, engines: int, devices_of_one: int) -> float:
        """Share of engines that are being replaced."""
        return min(1.0, self.an_hour(engines * devices_of_one) * self.engine_seconds / 3600.0 / engines)
