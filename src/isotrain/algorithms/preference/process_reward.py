"""Process reward models: is the solution still right at the end of this step?

N: ends of steps in the micro-batch, C: classes, in which the second one means a good step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from isotrain.algorithms.aggregate import Loss
from isotrain.algorithms.segments import assert_aligned, widen


def two_classes(logits_NC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of bad and good among the two: of a head with two classes, or of the two tokens for them."""
    assert logits_NC.shape[1] == 2
    logq_NC = F.log_softmax(widen(logits_NC), -1)
    return logq_NC[:, 0], logq_NC[:, 1]


def prm(logq_bad_N: torch.Tensor, logq_good_N: torch.Tensor, labels_N: torch.Tensor, steps: int) -> Loss:
    """Cross-entropy at the ends of steps, as a share of the mean over the batch's `steps`.

    `logq_*` come from `two_classes`, or are the two tokens' log-probs among the whole vocabulary. Labels
    between 0 and 1 are probabilities of a good step: `-(1 - p) log q_bad - p log q_good`.
    """
    assert_aligned(logq_bad_N, logq_good_N, labels_N)
    logq_bad_N, logq_good_N = widen(logq_bad_N), widen(logq_good_N)
    good_N = labels_N.to(logq_bad_N.dtype)
    loss_N = -(1 - good_N) * logq_bad_N - good_N * logq_good_N
    right_N = (logq_good_N > logq_bad_N) == (good_N > 0.5)
    return loss_N.sum() / steps, {"accuracy": right_N.float().sum() / steps}
