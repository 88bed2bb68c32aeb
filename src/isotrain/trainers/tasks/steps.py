"""Learning to score the steps of solutions.

N: ends of steps of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from isotrain.algorithms.aggregate import Loss
from isotrain.algorithms.preference.metrics import calibration_sums
from isotrain.algorithms.preference.process_reward import prm
from isotrain.data.loader import MicroBatch, StepData
from isotrain.engine.engine import Objective
from isotrain.engine.step_scores import StepScores, at_ends
from isotrain.trainers.tasks.preference import Work


@dataclass(frozen=True)
class PrmWork:
    step_scores: StepScores

    def __call__(self, data: StepData) -> Work:
        return [(at_ends(batch.packed), self._objective(batch, data.labels)) for batch in data.batches]

    def _objective(self, batch: MicroBatch, steps: int) -> Objective:
        def objective(head: Any) -> Loss:
            bad_N, good_N = self.step_scores(head)
            labels_N = batch.values_V.to(bad_N.device)
            loss, metrics = prm(bad_N, good_N, labels_N, steps)
            wrong_N, truly_wrong_N = bad_N > good_N, labels_N <= 0.5
            return loss, {
                **metrics,
                "found": (wrong_N & truly_wrong_N).float().sum() / steps,
                "called_wrong": wrong_N.float().sum() / steps,
                "wrong": truly_wrong_N.float().sum() / steps,
                **calibration_sums(torch.sigmoid(good_N - bad_N).detach(), ~truly_wrong_N, steps),
            }

        return objective
