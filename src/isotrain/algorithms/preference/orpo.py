"""Odds-ratio preference optimisation (Hong et al., arXiv:2403.07691): SFT and preference in one.

P: pairs of the micro-batch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from isotrain.algorithms.preference.pairs import PairLosses, Side


def orpo(chosen: Side, rejected: Side, *, beta: float = 0.1) -> PairLosses:
    """`nll_c - beta log sigmoid(log odds_c - log odds_r)`, `odds = p / (1 - p)`, `p = exp(mean logp)`.

    The negative log-likelihood of the chosen response is the mean over its tokens, as its odds are.
    """
    chosen_P, rejected_P = chosen.mean_logp_P(), rejected.mean_logp_P()
    log_odds_P = (chosen_P - rejected_P) - (_log1mexp(chosen_P) - _log1mexp(rejected_P))
    loss_P = -chosen_P - beta * F.logsigmoid(log_odds_P)
    return PairLosses(loss_P, beta * chosen_P, beta * rejected_P)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """`log(1 - exp(x))` for x < 0, exact near 0 and far from it (Maechler 2012)."""
    x = x.clamp(max=-1e-7)  # a certain response has infinite odds
    near = x > -math.log(2)
    # Each branch gets harmless numbers where the other is taken: no gradient is 0 times infinity.
    close = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, close, far)
