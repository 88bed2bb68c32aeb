"""A model with one number per token, or one for each class, over packed samples: a critic or a reward model.

N: positions whose numbers are wanted, D: hidden size, K: classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from isotrain.models.backbone import Backbone
from isotrain.models.context import Split

# The head in Hugging Face's layout of sequence and token classifiers; the latter's has a bias.
SCORE, SCORE_BIAS = "score.weight", "score.bias"


@dataclass(frozen=True)
class ScalarHead:
    """The head over the wanted positions: for a critic, the states before each response token."""

    hidden_ND: torch.Tensor
    weight_KD: torch.Tensor
    bias_K: torch.Tensor | None = None
    split: Split | None = None
    """Where other ranks have some of the positions: the numbers of all are then gathered."""

    def values(self) -> torch.Tensor:
        """The one number of each position."""
        return self.logits()[:, 0]

    def logits(self) -> torch.Tensor:
        """In float32, also the product: a narrower type has too few digits for returns and scores."""
        bias_K = None if self.bias_K is None else self.bias_K.float()
        logits_NK: torch.Tensor = F.linear(self.hidden_ND.float(), self.weight_KD.float(), bias_K)
        return logits_NK if self.split is None else self.split.of_wanted(logits_NK)


class ScalarModel(Backbone):
    """A classifier; there is nothing to predict, and the targets are not read."""

    def head(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, split: Split | None = None
    ) -> ScalarHead:
        score = self.pretrained.get_submodule("score")
        assert isinstance(score, nn.Linear)
        return ScalarHead(hidden_ND, score.weight, score.bias, split)
