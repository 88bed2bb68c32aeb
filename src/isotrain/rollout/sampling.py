"""Draws of tokens from logits that depend on seed and position alone.

B: rows, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from isotrain.rollout.base import Sampling


def draw(
    logits_BV: torch.Tensor, sampling: Sampling, seeds: Sequence[int], positions: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and log-prob of each row."""
    logits_BV = logits_BV.to("cpu", torch.float32)
    logp_BV = logps_of(logits_BV, sampling)
    token_B = choose(logits_BV, logp_BV, sampling, seeds, positions)
    return token_B, logp_BV.gather(1, token_B[:, None])[:, 0]


def logps_of(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probs in the distribution that is left by temperature, top-k and top-p.

    Greedy responses have the log-probs of temperature 1.
    """
    return (logits_BV if sampling.temperature == 0 else processed(logits_BV, sampling)).log_softmax(-1)


def choose(
    logits_BV: torch.Tensor,
    logp_BV: torch.Tensor,
    sampling: Sampling,
    seeds: Sequence[int],
    positions: Sequence[int],
) -> torch.Tensor:
    """A token of each row, on the host: the best, or a draw from the distribution."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).cpu()
    # The largest of log-prob plus Gumbel noise is a draw from the distribution.
    return (logp_BV.cpu() + gumbel(seeds, positions, logp_BV.shape[1])).argmax(-1)


def processed(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits at the temperature, those of tokens that cannot be drawn at minus infinity."""
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[1]:
        smallest_B1 = logits_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
    if sampling.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=-1)
        # From the least likely up: what is left out has together at most 1 - top_p. The best always stays.
        out_BV = sorted_BV.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        out_BV[:, -1] = False
        logits_BV = logits_BV.masked_fill(out_BV.scatter(1, order_BV, out_BV), -torch.inf)
    return logits_BV


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocabulary: int) -> torch.Tensor:
    """Noise from a counter-based generator: no state, hence no order in which rows must be drawn."""
    rows = []
    for seed, position in zip(seeds, positions, strict=True):
        key = np.array([seed % 2**64, position], dtype=np.uint64)
        rows.append(np.random.Generator(np.random.Philox(key=key)).gumbel(size=vocabulary))
    return torch.from_numpy(np.stack(rows))
