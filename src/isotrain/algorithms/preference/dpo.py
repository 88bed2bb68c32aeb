"""Direct preference optimisation (Rafailov et al., arXiv:2305.18290), with smoothed labels.

P: pairs of the micro-batch.
"""

from __future__ import annotations

from isotrain.algorithms.preference.pairs import PairLosses, Side, smoothed


def dpo(
    chosen: Side,
    rejected: Side,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    length_averaged: bool = False,
) -> PairLosses:
    """`-(1 - eps) log sigmoid(h) - eps log sigmoid(-h)`, `h = beta [(logp_c - ref_c) - (logp_r - ref_r)]`.

    `label_smoothing` is the assumed fraction of pairs with swapped labels. With
    `length_averaged`, log-probs are means over a response's tokens.
    """
    chosen_P = beta * chosen.log_ratio_P(length_averaged)
    rejected_P = beta * rejected.log_ratio_P(length_averaged)
    h_P = chosen_P - rejected_P
    return PairLosses(smoothed(h_P, label_smoothing), chosen_P, rejected_P)
