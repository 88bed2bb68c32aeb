"""The table of a device's fused operators: plain functions over tensors, whatever they are called there.

T: packed tokens, S: padded samples, L: their length, K: tokens that are seen, H: query heads,
G: key/value heads, D: head size, I: intermediate size, R: rows, sorted by expert, E: experts,
M: what a row has before an expert's matrix, N: what it has after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class FusedAttention(Protocol):
    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        dropout: float = 0.0,
        query_ends: Sequence[int] = (),
        key_ends: Sequence[int] = (),
    ) -> torch.Tensor:
        """Causal attention in the layout of the query.

        With ends, which count from the first token of all: `query_THD` over `key_KGD` and `value_KGD`, where
        the last query of a segment sees all of its keys. Without: `query_SLHD` over `key_SLGD`, `value_SLGD`.
        """


@dataclass(frozen=True)
class FusedOperators:
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """Input, weight and epsilon; the result has the wider type of the two tensors."""
    swiglu: Callable[[torch.Tensor], torch.Tensor]
    """From gate and up projection side by side, `(..., 2 * I)`: SiLU of the first times the second."""
    rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """`x_SLHD` turned by `cos_SL1D` and `sin_SL1D`, none of them above 1, as two halves."""
    attention: FusedAttention
    grouped_matmul: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """`rows_RM` times `weights_EMN`: the first `counts_E[0]` rows with the first matrix, the next ones with
    the second. The counts are whole numbers on the device, and their sum is R."""
