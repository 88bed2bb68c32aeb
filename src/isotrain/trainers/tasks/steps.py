"""Learning to judge the steps of solutions.

N: ends of steps of a micro-batch, C: the tokens for a wrong step and for a right one, V: all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from isotrain.algorithms.aggregate import Loss
from isotrain.algorithms.preference.process_reward import prm, prm_of_vocabulary
from isotrain.data.judged_feed import JudgedBatch, JudgedStep
from isotrain.data.packing import PackedBatch
from isotrain.engine.engine import Objective
from isotrain.models.head import TokenHead
from isotrain.trainers.tasks.judged import Work


@dataclass(frozen=True)
class PrmWork:
    bad: int
    good: int
    """The two tokens that a verdict is one of."""
    whole_vocabulary: bool

    def __call__(self, data: JudgedStep) -> Work:
        return [(_at_ends(batch.packed), self._objective(batch, data.judgements)) for batch in data.batches]

    def _objective(self, batch: JudgedBatch, steps: int) -> Objective:
        def objective(head: TokenHead) -> Loss:
            labels_N = batch.values_V.to(head.hidden_ND.device)
            if self.whole_vocabulary:
                bad_N, good_N = (self._logps(head, token) for token in (self.bad, self.good))
                loss, metrics = prm_of_vocabulary(bad_N, good_N, labels_N, steps)
                wrong_N = bad_N > good_N
            else:
                weight_CD = head.weight_VD[[self.bad, self.good]]
                logits_NC = F.linear(head.hidden_ND, weight_CD)
                loss, metrics = prm(logits_NC, labels_N, steps)
                wrong_N = logits_NC[:, 0] > logits_NC[:, 1]
            truly_wrong_N = labels_N <= 0.5
            return loss, {
                **metrics,
                "found": (wrong_N & truly_wrong_N).float().sum() / steps,
                "called_wrong": wrong_N.float().sum() / steps,
                "wrong": truly_wrong_N.float().sum() / steps,
            }

        return objective

    def _logps(self, head: TokenHead, token: int) -> torch.Tensor:
        return replace(head, targets_N=torch.full_like(head.targets_N, token)).logps()


def _at_ends(batch: PackedBatch) -> PackedBatch:
    """Read the model at the marked tokens themselves, and not at the ones that predict them."""
    end_N = batch.predict_N + 1
    return replace(batch, predict_N=end_N, targets_N=batch.tokens_T[end_N])


def f1_figures(metrics: dict[str, float]) -> dict[str, float]:
    """F1 of finding the wrong steps, from shares of the steps that add up over ranks."""
    found, called, wrong = (metrics[name] for name in ("found", "called_wrong", "wrong"))
    rest = {name: value for name, value in metrics.items() if name not in ("found", "called_wrong", "wrong")}
    return {**rest, "f1": 2 * found / (called + wrong) if called + wrong else 1.0}
