"""Identity preference optimisation (Azar et al., arXiv:2310.12036): a fixed target margin.

P: pairs of the micro-batch.
"""

from __future__ import annotations

from isotrain.algorithms.preference.pairs import PairLosses, Side


def ipo(chosen: Side, rejected: Side, *, beta: float = 0.1, length_averaged: bool = False) -> PairLosses:
    """`((logp_c - ref_c) - (logp_r - ref_r) - 1 / (2 beta))^2`; TRL has it with `length_averaged`."""
    chosen_P, rejected_P = chosen.log_ratio_P(length_averaged), rejected.log_ratio_P(length_averaged)
    loss_P = (chosen_P - rejected_P - 1 / (2 * beta)).square()
    return PairLosses(loss_P, beta * chosen_P, beta * rejected_P)
