"""A Hugging Face backbone over packed samples, whatever head comes after it.

T: packed tokens, S: samples, L: longest sample, D: hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel


def is_padded(attention: str) -> bool:
    """Whether samples lie in rows of one length instead of side by side."""
    return attention in ("padded", "fused-padded")


def shares_prompts(attention: str) -> bool:
    """Whether this attention can compute a prompt once for several responses."""
    return attention in ("sdpa", "fused")


@dataclass(frozen=True)
class Backbone:
    pretrained: PreTrainedModel
    """A model with any head; only its base is run."""
    attention: str

    def hidden_states(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        lengths: tuple[int, ...],
        continues: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """`lengths` and `continues` are those of a `PackedBatch`."""
        assert not continues or shares_prompts(self.attention)
        if is_padded(self.attention):
            return self._padded(tokens_T, lengths)
        extras: dict[str, Any] = {"segment_lengths": lengths, "segment_continues": continues}
        if self.attention == "flash":
            bounds = torch.tensor((0, *lengths), device=tokens_T.device).cumsum(0, dtype=torch.int32)
            longest = max(lengths)
            extras = {
                "cu_seq_lens_q": bounds,
                "cu_seq_lens_k": bounds,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        output = self.pretrained.base_model(
            input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, **extras
        )
        hidden_TD: torch.Tensor = output.last_hidden_state[0]
        return hidden_TD

    def _padded(self, tokens_T: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        tokens_SL = pad_sequence(list(tokens_T.split(lengths)), batch_first=True)
        place_L = torch.arange(tokens_SL.shape[1], device=tokens_T.device)
        real_SL = place_L[None] < torch.tensor(lengths, device=tokens_T.device)[:, None]
        output = self.pretrained.base_model(
            input_ids=tokens_SL, attention_mask=real_SL.long(), use_cache=False
        )
        hidden_TD: torch.Tensor = output.last_hidden_state[real_SL]
        return hidden_TD
