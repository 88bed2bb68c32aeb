"""A causal language model that reads packed samples.

T: packed tokens, N: loss-bearing tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from isotrain.models.backbone import Backbone
from isotrain.models.fused import NONE_FUSED, Fused
from isotrain.models.head import TokenHead

Result = TypeVar("Result")


class PackedModel(nn.Module):
    """Runs the backbone over packed samples and hands the head to an objective.

    The objective runs inside `forward`: sharded weights, the head's among them, are whole only there.
    """

    prefix: ClassVar[str] = "causal_lm."
    """Before the Hugging Face names of its parameters."""

    def __init__(
        self, causal_lm: PreTrainedModel, attention: str, logits_chunk: int, fused: Fused = NONE_FUSED
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.attention = attention
        self.fused = fused
        self.logits_chunk = logits_chunk

    @property
    def pretrained(self) -> PreTrainedModel:
        return self.causal_lm

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        lengths: tuple[int, ...],
        predict_N: torch.Tensor,
        targets_N: torch.Tensor,
        objective: Callable[[TokenHead], Result],
        continues: tuple[int, ...] = (),
    ) -> Result:
        backbone = Backbone(self.causal_lm, self.attention)
        hidden_TD = backbone.hidden_states(tokens_T, positions_T, lengths, continues)
        weight_VD = self.causal_lm.get_output_embeddings().weight
        head = TokenHead(hidden_TD.index_select(0, predict_N), weight_VD, targets_N, self.logits_chunk)
        return objective(head)
