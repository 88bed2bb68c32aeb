"""The engines of a run: what they are told of new weights, and that they have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isotrain.children import in_background
from isotrain.cluster.failures import Overdue
from isotrain.cluster.replaceable import Died, Replaceable, WorkerTask
from isotrain.cluster.workers import WorkerCall, WorkerGroup
from isotrain.errors import WeightUpdateError
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.weights.check import Tolerance, WeightCheck, mean_difference
from isotrain.weights.update import WeightUpdate


class Weights(NamedTuple):
    version: int
    updates: list[WeightUpdate] | None
    """Where each engine finds them; None where they were sent and are nowhere to be found again."""
    logps: npt.NDArray[np.float32]
    """The trained model's log-probs of the prompts of the weight check, with these weights."""


@dataclass(frozen=True)
class Delivery:
    """Weights on their way to one engine."""

    free: WorkerTask[WorkerCall[None]] | None
    """Done when the engine has finished its earlier calls; in flight, they are not waited for."""
    update: WorkerTask[WorkerCall[tuple[int, npt.NDArray[np.float32]]]]
    weights: Weights


class Engines(Replaceable[RolloutWorker]):
    """Updates are queued behind what an engine is doing, or come between its tokens; every one is verified.

    The engine itself compares what it got with the update's digest. Here its version is compared, and its
    log-probs of fixed prompts with those of the trained model (weights/check.py), which shows that the
    weights also mean the same. Earlier calls of an engine may take any time: the timeout of an update begins
    after them, or at once where updates are `in_flight`.
    """

    def __init__(
        self,
        group: WorkerGroup[RolloutWorker],
        start_timeout: float,
        tell: Callable[[str], None],
        *,
        check_prompts: Sequence[npt.NDArray[np.int32]],
        timeout: float,
        tolerance: Tolerance,
        in_flight: bool = False,
    ) -> None:
        super().__init__(group, start_timeout, tell)
        self.in_flight = in_flight
        self.check_prompts, self.timeout = check_prompts, timeout
        self._check = WeightCheck(tolerance)
        self.newest: Weights | None = None
        self.under_way: list[Delivery] = []
        self._verification: Future[float] | None = None
        """The verification of updates under way, once somebody waits for it."""
        self.difference = 0.0
        """The weight check's difference at the update that was verified last."""
        self.write_again: Callable[[Weights], Weights] | None = None
        """Writes weights that were sent to where they can be found."""

    def verify(self) -> float:
        """Check that all engines have the newest weights; returns the largest difference."""
        weights, differences = self.newest, []
        assert weights is not None
        method = RolloutWorker.version_and_check
        for task in [self.submit(index, method, self.check_prompts) for index in range(len(self))]:
            check = self.result(task, self.timeout)
            if not isinstance(check, Died):  # a successor was verified when it was given them
                differences.append(self._compared(task.index, *check, weights))
        return self._noted(differences)

    @property
    def first_version(self) -> int:
        """The version that responses must begin with from now on; 0 where calls keep their order anyway."""
        return self.newest.version if self.in_flight and self.newest else 0

    def send(
        self,
        weights: Weights,
        buffered: Sequence[WeightUpdate] | None = None,
        taken: Sequence[WorkerTask[Any]] = (),
    ) -> None:
        """Announce new weights; `settle` waits until they are loaded.

        From the second buffer of each engine where they are `buffered`, by the calls that have `taken` them.
        """
        updates = weights.updates if buffered is None else buffered
        assert updates is not None
        self.newest, self._verification = weights, None
        self.under_way = [
            self._send_to(index, update, weights, taken[index].deaths if taken else None)
            for index, update in enumerate(updates)
        ]

    def _send_to(
        self, index: int, announced: WeightUpdate, weights: Weights, deaths: int | None = None
    ) -> Delivery:
        with self._places[index]:  # no thread may ask for responses in between
            if deaths is not None and self.deaths[index] != deaths:  # a successor has no such buffer
                weights = self._written_again(weights)
                assert weights.updates is not None
                announced = weights.updates[index]
            free = None if self.in_flight else self.submit(index, RolloutWorker.report)
            update = self.submit(index, RolloutWorker.update_and_check, announced, self.check_prompts)
            return Delivery(free, update, weights)

    def _written_again(self, weights: Weights) -> Weights:
        """In files; of a newer version where the ranks have gone on."""
        assert self.write_again is not None
        written = self.write_again(weights)
        if written.version == weights.version:
            self.newest = written
        return written

    def settle(self) -> float:
        """Wait until all engines have the newest weights; returns the weight check's largest difference."""
        return self._settle() if self._verification is None else self._verification.result()

    def verifying(self) -> Future[float]:
        """A future of what `settle` returns or raises."""
        if self._verification is None:
            self._verification = in_background(self._settle)
        return self._verification

    def _settle(self) -> float:
        deliveries, self.under_way = self.under_way, []
        verified = [self._verified(delivery) for delivery in deliveries]
        return self._noted([difference for difference in verified if difference is not None])

    def _noted(self, differences: Sequence[float]) -> float:
        """The largest of them; that of the update before, where all engines have died since."""
        if differences:
            self.difference = max(differences)
        return self.difference

    def _verified(self, delivery: Delivery) -> float | None:
        name, weights = engine_name(delivery.update.index), delivery.weights
        if delivery.free is not None:
            self.result(delivery.free)
        try:
            check = self.result(delivery.update, self.timeout)
        except Overdue as error:
            raise WeightUpdateError(
                f"{name}: weight update {weights.version} did not end within {self.timeout:g} s "
                "(rollout.update_timeout)"
            ) from error
        if isinstance(check, Died):
            return None  # its successor has been given the newest weights, and they were verified
        return self._compared(delivery.update.index, *check, weights)

    def _compared(self, index: int, version: int, logps: npt.NDArray[np.float32], weights: Weights) -> float:
        name = engine_name(index)
        if version != weights.version:
            raise WeightUpdateError(f"{name} has weights of version {version} after update {weights.version}")
        if problem := self._check.problem(index, version, logps, weights.logps):
            raise WeightUpdateError(f"{name}: after weight update {version} {problem}")
        return mean_difference(logps, weights.logps)

    def prepare(self, index: int) -> None:
        super().prepare(index)
        if (weights := self.newest) is not None:
            if weights.updates is None:
                weights = self._written_again(weights)
            assert weights.updates is not None
            engine = self.group.within(self.timeout)
            check = engine.call_on(
                index, RolloutWorker.update_and_check, weights.updates[index], self.check_prompts
            )
            self._compared(index, *check, weights)


def engine_name(index: int) -> str:
    return f"rollout engine {index}"
