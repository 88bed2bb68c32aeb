"""The generation engines as the controller sees them: all with the same verified weights.

T: tokens of the weight check.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isotrain.cluster.failures import Overdue
from isotrain.cluster.workers import Call, WorkerGroup
from isotrain.errors import WeightUpdateError
from isotrain.rollout.base import WeightUpdate
from isotrain.trainers.online.background import in_background
from isotrain.trainers.online.replaceable import Died, Replaceable, Task
from isotrain.trainers.online.rollout_worker import RolloutWorker


class Weights(NamedTuple):
    version: int
    updates: list[WeightUpdate]
    """Where each engine finds them."""
    logps: npt.NDArray[np.float32]
    """The trained model's log-probs of a fixed prompt with these weights."""


@dataclass(frozen=True)
class Delivery:
    """Weights on their way to one engine."""

    free: Task[Call[None]]
    """Done when the engine has finished its earlier calls."""
    update: Task[Call[int]]
    logps: Task[Call[npt.NDArray[np.float32]]]
    weights: Weights


@dataclass(frozen=True)
class Tolerance:
    """How far log-probs of a fixed prompt may differ: at the first update, then relative to earlier ones.

    Rounding differs from model to model, and grows slowly as a model leaves that prompt behind; weights that
    an engine did not take show at once.
    """

    first: float
    least: float
    most: float
    factor: float = 4.0

    def after(self, largest: float | None) -> float:
        """`largest`: of all updates so far."""
        return self.first if largest is None else min(self.most, max(self.least, self.factor * largest))


class Engines(Replaceable[RolloutWorker]):
    """Updates are queued behind what an engine is doing, and every one is verified.

    The engine itself compares what it got with the update's digest. Here its version is compared, and its
    log-probs of a fixed prompt with those of the trained model, which shows that the weights also mean the
    same. Earlier calls of an engine may take any time: the timeout of an update begins after them.
    """

    def __init__(
        self,
        group: WorkerGroup[RolloutWorker],
        start_timeout: float,
        tell: Callable[[str], None],
        *,
        check_T: npt.NDArray[np.int32],
        timeout: float,
        tolerance: Tolerance,
    ) -> None:
        super().__init__(group, start_timeout, tell)
        self.check_T, self.timeout, self.tolerance = check_T, timeout, tolerance
        self.newest: Weights | None = None
        self.under_way: list[Delivery] = []
        self._verification: Future[float] | None = None
        """Of what is under way, once somebody watches it."""
        self.difference = 0.0
        """In the weight check, of the update that was verified last."""
        self.largest: float | None = None
        """In the weight check, of all updates."""

    def send(self, weights: Weights) -> None:
        """Announce new weights; `settle` waits until they are taken."""
        self.newest, self._verification = weights, None
        self.under_way = [self._send_to(index, weights) for index in range(len(self))]

    def _send_to(self, index: int, weights: Weights) -> Delivery:
        with self._places[index]:  # no thread may ask for responses in between
            free = self.submit(index, RolloutWorker.report)
            update = self.submit(index, RolloutWorker.update, weights.updates[index])
            logps = self.submit(index, RolloutWorker.weight_check, self.check_T)
            return Delivery(free, update, logps, weights)

    def settle(self) -> float:
        """Wait until all engines have the newest weights; returns the weight check's largest difference."""
        return self._settle() if self._verification is None else self._verification.result()

    def verifying(self) -> Future[float]:
        """What `settle` will return or raise, without waiting for it."""
        if self._verification is None:
            self._verification = in_background(self._settle)
        return self._verification

    def _settle(self) -> float:
        deliveries, self.under_way = self.under_way, []
        verified = [self._verified(delivery) for delivery in deliveries]
        if found := [difference for difference in verified if difference is not None]:
            self.difference = max(found)
            self.largest = max(self.difference, self.largest or 0.0)
        return self.difference

    def _verified(self, delivery: Delivery) -> float | None:
        name, weights = engine_name(delivery.update.index), delivery.weights
        self.result(delivery.free)
        try:
            version = self.result(delivery.update, self.timeout)
            logps = self.result(delivery.logps, self.timeout)
        except Overdue as error:
            raise WeightUpdateError(
                f"{name}: weight update {weights.version} did not end within {self.timeout:g} s "
                "(rollout.update_timeout)"
            ) from error
        if isinstance(version, Died) or isinstance(logps, Died):
            return None  # its successor has been given the newest weights, and they were verified
        return self._compared(name, version, logps, weights)

    def _compared(self, name: str, version: int, logps: npt.NDArray[np.float32], weights: Weights) -> float:
        if version != weights.version:
            raise WeightUpdateError(f"{name} has weights of version {version} after update {weights.version}")
        difference = float(np.abs(logps - weights.logps).mean())
        allowed = self.tolerance.after(self.largest)
        if not difference <= allowed:
            raise WeightUpdateError(
                f"{name}: after weight update {weights.version} its log-probs differ from the trained model "
                f"by {difference:.3g} on average; {allowed:.3g} is allowed (rollout.weight_check_tolerance)"
            )
        return difference

    def prepare(self, index: int) -> None:
        super().prepare(index)
        if (weights := self.newest) is not None:
            engine = self.group.within(self.timeout)
            version = engine.call_on(index, RolloutWorker.update, weights.updates[index])
            logps = engine.call_on(index, RolloutWorker.weight_check, self.check_T)
            self._compared(engine_name(index), version, logps, weights)


def engine_name(index: int) -> str:
    return f"rollout engine {index}"
