"""Reward models: a score for each response, higher for the better one (Bradley-Terry).

P: pairs of the micro-batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from isotrain.algorithms.preference.pairs import PairLosses
from isotrain.algorithms.segments import assert_aligned, widen


def rm(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    *,
    margin_P: torch.Tensor | None = None,
    loss: str = "sigmoid",
    centre: float = 0.0,
) -> PairLosses:
    """`-log sigmoid(r_c - r_r - margin)`, or with `logexp` `log(1 + exp(r_r - r_c))`.

    The two are the same function; the second takes no margin, and is how OpenRLHF names and computes it.
    `centre` times `(r_c + r_r)^2` keeps scores around 0, which pairs alone do not determine.
    """
    assert_aligned(chosen_P, rejected_P, margin_P)
    chosen_P, rejected_P = widen(chosen_P), widen(rejected_P)
    difference_P = chosen_P - rejected_P
    if loss == "logexp":
        assert margin_P is None, "logexp has no margin"
        loss_P = F.softplus(-difference_P)
    else:
        loss_P = -F.logsigmoid(difference_P if margin_P is None else difference_P - margin_P)
    if centre:
        loss_P = loss_P + centre * (chosen_P + rejected_P).square()
    return PairLosses(loss_P, chosen_P, rejected_P)
