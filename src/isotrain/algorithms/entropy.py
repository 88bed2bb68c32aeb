"""The entropy bonus.

N: response tokens of a micro-batch.
"""

from __future__ import annotations

import torch

from isotrain.algorithms.aggregate import AGGREGATIONS, Loss, LossNormalizer


def entropy_bonus(
    entropy_N: torch.Tensor,
    share: LossNormalizer,
    *,
    coefficient: float = 0.0,
    aggregation: str = "token-mean",
) -> Loss:
    """`-coefficient entropy`, to be added to the policy loss."""
    entropy = AGGREGATIONS[aggregation](entropy_N, share)
    return -coefficient * entropy, {"actor/entropy": entropy.detach()}
