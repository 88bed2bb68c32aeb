"""The generation engines as the controller sees them: all with the same verified weights.

T: tokens of the probe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isotrain.cluster.failures import Overdue
from isotrain.cluster.workers import WorkerGroup
from isotrain.errors import WeightUpdateError
from isotrain.rollout.update import WeightUpdate
from isotrain.trainers.online.replaceable import Replaceable, Task


class Weights(NamedTuple):
    version: int
    updates: list[WeightUpdate]
    """Where each engine finds them."""
    logps: npt.NDArray[np.float32]
    """The trained model's log-probs of the probe with these weights."""


class Engines(Replaceable):
    """Updates are queued behind what an engine is doing, and every one is verified.

    The engine itself compares what it got with the update's digest. Here its version is compared, and its
    log-probs of a probe with those of the trained model, which shows that the weights also mean the same.
    """

    def __init__(
        self,
        group: WorkerGroup,
        start_timeout: float,
        tell: Callable[[str], None],
        *,
        probe_T: npt.NDArray[np.int32],
        timeout: float,
        tolerance: float,
    ) -> None:
        super().__init__(group, start_timeout, tell)
        self.probe_T, self.timeout, self.tolerance = probe_T, timeout, tolerance
        self.newest: Weights | None = None
        self.under_way: list[tuple[Task, Task]] = []

    def send(self, weights: Weights) -> None:
        """Announce new weights; `settle` waits until they are taken."""
        self.newest = weights
        self.under_way = [self._send_to(index, weights) for index in range(len(self))]

    def _send_to(self, index: int, weights: Weights) -> tuple[Task, Task]:
        return self.submit(index, "update", weights.updates[index]), self.submit(index, "probe", self.probe_T)

    def settle(self) -> float:
        """Wait until all engines have the newest weights; returns the largest difference on the probe."""
        tasks, self.under_way = self.under_way, []
        return max((self._verified(update, probe) for update, probe in tasks), default=0.0)

    def _verified(self, update: Task, probe: Task) -> float:
        assert self.newest is not None
        name, wanted = engine_name(update.index), self.newest.version
        try:
            version = self.result(update, self.timeout)
            logps = self.result(probe, self.timeout)
        except Overdue as error:
            raise WeightUpdateError(
                f"{name}: weight update {wanted} has not ended within {self.timeout:g} s "
                "(rollout.update_timeout)"
            ) from error
        if version is None or logps is None:
            return 0.0  # it died, and its successor has been given the newest weights
        if version != wanted:
            raise WeightUpdateError(f"{name} has weights of version {version} after update {wanted}")
        difference = float(np.abs(logps - self.newest.logps).mean())
        if not difference <= self.tolerance:
            raise WeightUpdateError(
                f"{name}: after weight update {wanted} its log-probs differ from the trained model's by "
                f"{difference:.3g} in the mean, more than rollout.probe_tolerance ({self.tolerance:g})"
            )
        return difference

    def prepare(self, index: int) -> None:
        super().prepare(index)
        if self.newest is not None:
            self._verified(*self._send_to(index, self.newest))


def engine_name(index: int) -> str:
    return f"rollout engine {index}"
