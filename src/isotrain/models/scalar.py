"""A model with one number per token, or one for each class, over packed samples: a critic or a reward model.

T: packed tokens, N: positions whose numbers are wanted, D: hidden size, K: classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from isotrain.models.backbone import Backbone
from isotrain.models.fused import NONE_FUSED, Fused

Result = TypeVar("Result")

# The head in Hugging Face's layout of sequence and token classifiers; the latter's has a bias.
SCORE, SCORE_BIAS = "score.weight", "score.bias"


@dataclass(frozen=True)
class ScalarHead:
    """The head over the wanted positions: for a critic, the states before each response token."""

    hidden_ND: torch.Tensor
    weight_KD: torch.Tensor
    bias_K: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """The one number of each position."""
        return self.logits()[:, 0]

    def logits(self) -> torch.Tensor:
        """In float32, also the product: a narrower type has too few digits for returns and scores."""
        bias_K = None if self.bias_K is None else self.bias_K.float()
        logits_NK: torch.Tensor = F.linear(self.hidden_ND.float(), self.weight_KD.float(), bias_K)
        return logits_NK


class ScalarModel(nn.Module):
    """Runs a classifier's backbone over packed samples and hands its head to an objective.

    Called like `PackedModel`; there is nothing to predict, and the targets are not read.
    """

    prefix: ClassVar[str] = "classifier."
    """Before the Hugging Face names of its parameters."""

    def __init__(self, classifier: PreTrainedModel, attention: str, fused: Fused = NONE_FUSED) -> None:
        super().__init__()
        self.classifier = classifier
        self.attention = attention
        self.fused = fused

    @property
    def pretrained(self) -> PreTrainedModel:
        return self.classifier

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        lengths: tuple[int, ...],
        predict_N: torch.Tensor,
        targets_N: torch.Tensor,
        objective: Callable[[ScalarHead], Result],
        continues: tuple[int, ...] = (),
    ) -> Result:
        backbone = Backbone(self.classifier, self.attention)
        hidden_TD = backbone.hidden_states(tokens_T, positions_T, lengths, continues)
        score = self.classifier.get_submodule("score")
        assert isinstance(score, nn.Linear)
        return objective(ScalarHead(hidden_TD.index_select(0, predict_N), score.weight, score.bias))
