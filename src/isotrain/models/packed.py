"""A causal language model that reads packed samples, and its head: token log-probs and entropies.

N: loss-bearing tokens, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from isotrain.models.backbone import Backbone
from isotrain.models.chunks import LogpsAndEntropies, NllShare
from isotrain.models.context import Split
from isotrain.models.fused import NONE_FUSED, Fused


@dataclass(frozen=True)
class TokenHead:
    """The language-model head over the positions that predict loss-bearing tokens."""

    hidden_ND: torch.Tensor
    weight_VD: torch.Tensor
    targets_N: torch.Tensor
    chunk: int
    split: Split | None = None
    """Where other ranks have some of the positions: what these are for all is then gathered."""

    def nll_share(self, loss_tokens: int) -> torch.Tensor:
        """These tokens' share of the mean negative log-likelihood over `loss_tokens` tokens.

        Its gradient is taken while the logits are there: it costs no second pass over them.
        """
        if not torch.is_grad_enabled():
            return -self.logps().sum() / loss_tokens
        share: torch.Tensor = NllShare.apply(  # type: ignore[no-untyped-call]
            self.hidden_ND, self.weight_VD, self.targets_N, loss_tokens, self.chunk
        )
        return share if self.split is None else self.split.summed(share)

    def logps(self, temperature: float = 1.0) -> torch.Tensor:
        """The targets' log-probs, float32; the logits are computed again in the backward pass."""
        return self._logps(temperature, entropies=False)[0]

    def logps_and_entropies(self, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The same log-probs, bit for bit, and the entropy of each token's distribution, float32.

        An entropy that no loss depends on costs nothing in the backward pass.
        """
        return self._logps(temperature, entropies=True)

    def _logps(self, temperature: float, entropies: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logp_N, entropy_N = LogpsAndEntropies.apply(  # type: ignore[no-untyped-call]
            self.hidden_ND, self.weight_VD, self.targets_N, self.chunk, temperature, entropies
        )
        return self._whole(logp_N), self._whole(entropy_N) if entropies else entropy_N

    def logits_of(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of some tokens of the vocabulary alone, one column each."""
        return self._whole(F.linear(self.hidden_ND, self.weight_VD[list(tokens)]))

    def _whole(self, values_N: torch.Tensor) -> torch.Tensor:
        return values_N if self.split is None else self.split.of_wanted(values_N)


class PackedModel(Backbone):
    def __init__(
        self, causal_lm: PreTrainedModel, attention: str, logits_chunk: int, fused: Fused = NONE_FUSED
    ) -> None:
        super().__init__(causal_lm, attention, fused)
        self.logits_chunk = logits_chunk

    def head(self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, split: Split | None = None) -> TokenHead:
        weight_VD = self.pretrained.get_output_embeddings().weight
        return TokenHead(hidden_ND, weight_VD, targets_N, self.logits_chunk, split)
