"""A causal language model that reads packed samples.

T: packed tokens, S: samples, L: longest sample, N: loss-bearing tokens, D: hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from isotrain.models.head import TokenHead

Result = TypeVar("Result")


class PackedModel(nn.Module):
    """Runs the backbone over packed samples and hands the head to an objective.

    The objective runs inside `forward`: sharded weights, the head's among them, are whole only there.
    """

    def __init__(self, causal_lm: PreTrainedModel, attention: str, head_chunk: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.attention = attention
        self.head_chunk = head_chunk

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        lengths: tuple[int, ...],
        predict_N: torch.Tensor,
        targets_N: torch.Tensor,
        objective: Callable[[TokenHead], Result],
    ) -> Result:
        hidden_TD = self._hidden_states(tokens_T, positions_T, lengths)
        weight_VD = self.causal_lm.get_output_embeddings().weight
        head = TokenHead(hidden_TD.index_select(0, predict_N), weight_VD, targets_N, self.head_chunk)
        return objective(head)

    def _hidden_states(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, lengths: tuple[int, ...]
    ) -> torch.Tensor:
        if self.attention == "padded":
            return self._padded(tokens_T, lengths)
        extras: dict[str, Any] = {"segment_lengths": lengths}
        if self.attention == "flash":
            bounds = torch.tensor((0, *lengths), device=tokens_T.device).cumsum(0, dtype=torch.int32)
            longest = max(lengths)
            extras = {
                "cu_seq_lens_q": bounds,
                "cu_seq_lens_k": bounds,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        output = self.causal_lm.base_model(
            input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, **extras
        )
        hidden_TD: torch.Tensor = output.last_hidden_state[0]
        return hidden_TD

    def _padded(self, tokens_T: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        tokens_SL = pad_sequence(list(tokens_T.split(lengths)), batch_first=True)
        place_L = torch.arange(tokens_SL.shape[1], device=tokens_T.device)
        real_SL = place_L[None] < torch.tensor(lengths, device=tokens_T.device)[:, None]
        output = self.causal_lm.base_model(
            input_ids=tokens_SL, attention_mask=real_SL.long(), use_cache=False
        )
        hidden_TD: torch.Tensor = output.last_hidden_state[real_SL]
        return hidden_TD
