"""A Hugging Face backbone over packed samples, whatever head comes after it.

T: packed tokens, N: those whose states are wanted, S: samples, L: longest sample, D: hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from isotrain.models.attention import FUSED, SEGMENTS
from isotrain.models.context import ContextGroup, Split
from isotrain.models.fused import NONE_FUSED, Fused
from isotrain.models.routing import RouterBalance

Result = TypeVar("Result")


def is_padded(attention: str) -> bool:
    """Whether samples lie in rows of one length instead of side by side."""
    return attention in ("padded", "fused-padded")


def shares_prompts(attention: str) -> bool:
    """Whether this attention can compute a prompt once for several responses."""
    return attention in ("sdpa", "fused")


class Backbone(nn.Module):
    """Runs a model's base over packed samples and hands its head to an objective.

    The objective runs inside `forward`: sharded weights, the head's among them, are whole only there.
    """

    prefix: ClassVar[str] = "pretrained."
    """Before the Hugging Face names of its parameters."""

    def __init__(self, pretrained: PreTrainedModel, attention: str, fused: Fused = NONE_FUSED) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.attention = attention
        self.fused = fused
        self.balance: RouterBalance | None = None
        """Set where the routers of a mixture are to spread tokens evenly."""
        self.imbalance: torch.Tensor | None = None
        """What `balance` found in the last forward pass, while training."""
        self.context: ContextGroup | None = None
        """Set where other ranks compute some of a micro-batch's tokens."""

    def head(self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, split: Split | None = None) -> Any:
        """What objectives see, over the wanted states; some models have nothing to predict."""
        raise NotImplementedError

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        lengths: tuple[int, ...],
        predict_N: torch.Tensor,
        targets_N: torch.Tensor,
        objective: Callable[[Any], Result],
        continues: tuple[int, ...] = (),
        predict_on_host_N: npt.NDArray[np.int64] | None = None,
    ) -> Result:
        if self.context is None:
            hidden_TD = self.hidden_states(tokens_T, positions_T, lengths, continues)
            return objective(self.head(hidden_TD.index_select(0, predict_N), targets_N))
        # This rank's part of the tokens; all ranks of the group get the same result.
        assert shares_prompts(self.attention)
        inner = FUSED if self.attention == "fused" else SEGMENTS
        # Sharding moves tensors among its inputs to the device, arrays not.
        wanted_N = predict_N.cpu().numpy() if predict_on_host_N is None else predict_on_host_N
        split = Split.of(self.context, lengths, continues, wanted_N, inner)
        output = self._run(
            input_ids=split.own(tokens_T)[None], position_ids=split.own(positions_T)[None], split=split
        )
        at_M, own_M = (x.to(tokens_T.device) for x in (split.wanted.at_M, split.wanted.own_M))
        hidden_MD = output.last_hidden_state[0].index_select(0, at_M)
        return objective(self.head(hidden_MD, targets_N[own_M], split))

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
        output = self._run(input_ids=tokens_T[None], position_ids=positions_T[None], **extras)
        hidden_TD: torch.Tensor = output.last_hidden_state[0]
        return hidden_TD

    def _padded(self, tokens_T: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        tokens_SL = pad_sequence(list(tokens_T.split(lengths)), batch_first=True)
        place_L = torch.arange(tokens_SL.shape[1], device=tokens_T.device)
        real_SL = place_L[None] < torch.tensor(lengths, device=tokens_T.device)[:, None]
        output = self._run(input_ids=tokens_SL, attention_mask=real_SL.long())
        hidden_TD: torch.Tensor = output.last_hidden_state[real_SL]
        return hidden_TD

    def _run(self, **inputs: Any) -> Any:
        if self.balance is None or not (self.training and torch.is_grad_enabled()):
            return self.pretrained.base_model(use_cache=False, **inputs)
        output = self.pretrained.base_model(use_cache=False, output_router_logits=True, **inputs)
        logits, split = output.router_logits, inputs.get("split")
        if split is not None:
            logits = tuple(split.of_tokens(layer_LE) for layer_LE in logits)
        self.imbalance = self.balance(logits, inputs.get("attention_mask"))
        return output
