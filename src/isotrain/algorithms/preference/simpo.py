"""Simple preference optimisation (Meng et al., arXiv:2405.14734): log-probs per token, no reference.

P: pairs of the micro-batch.
"""

from __future__ import annotations

from isotrain.algorithms.preference.pairs import PairLosses, Side, smoothed


def simpo(
    chosen: Side, rejected: Side, *, beta: float = 2.0, margin: float = 1.0, label_smoothing: float = 0.0
) -> PairLosses:
    """`-log sigmoid(h)`, `h = beta (mean logp_c - mean logp_r) - margin`, with labels smoothed as in DPO."""
    chosen_P, rejected_P = beta * chosen.mean_logp_P(), beta * rejected.mean_logp_P()
    h_P = chosen_P - rejected_P - margin
    return PairLosses(smoothed(h_P, label_smoothing), chosen_P, rejected_P)
