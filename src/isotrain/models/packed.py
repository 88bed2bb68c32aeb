"""Hugging Face models over packed samples: the backbone, and heads for token log-probs or scores.

T: packed tokens, N: those whose states are used, S: samples, L: longest sample, D: hidden size,
V: vocabulary, K: classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from isotrain.models.attention import FUSED, SEGMENTS
from isotrain.models.chunks import LogpsAndEntropies, NllShare
from isotrain.models.context import ContextGroup, Split
from isotrain.models.experts import RouterBalance
from isotrain.models.fused import NONE_FUSED, Fused

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
        """Result of `balance` in the last forward pass, while training."""
        self.context: ContextGroup | None = None
        """Set where other ranks compute some of a micro-batch's tokens."""

    def head(self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, split: Split | None = None) -> Any:
        """The head that objectives get, over the selected states; some models have nothing to predict."""
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
        selected_N = predict_N.cpu().numpy() if predict_on_host_N is None else predict_on_host_N
        split = Split.of(self.context, lengths, continues, selected_N, inner)
        output = self._run(
            input_ids=split.own(tokens_T)[None], position_ids=split.own(positions_T)[None], split=split
        )
        at_M, own_M = (x.to(tokens_T.device) for x in (split.selected.at_M, split.selected.own_M))
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
        """Logits of some tokens of the vocabulary alone, one column each."""
        return self._whole(F.linear(self.hidden_ND, self.weight_VD[list(tokens)]))

    def _whole(self, values_N: torch.Tensor) -> torch.Tensor:
        return values_N if self.split is None else self.split.of_selected(values_N)


class PackedModel(Backbone):
    def __init__(
        self, causal_lm: PreTrainedModel, attention: str, logits_chunk: int, fused: Fused = NONE_FUSED
    ) -> None:
        super().__init__(causal_lm, attention, fused)
        self.logits_chunk = logits_chunk

    def head(self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, split: Split | None = None) -> TokenHead:
        weight_VD = self.pretrained.get_output_embeddings().weight
        return TokenHead(hidden_ND, weight_VD, targets_N, self.logits_chunk, split)


# The head in Hugging Face's layout of sequence and token classifiers; the latter's has a bias.
SCORE, SCORE_BIAS = "score.weight", "score.bias"


@dataclass(frozen=True)
class ScalarHead:
    """The head over the selected positions: for a critic, the states before each response token."""

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
        return logits_NK if self.split is None else self.split.of_selected(logits_NK)


class ScalarModel(Backbone):
    """A classifier; there is nothing to predict, and the targets are not read."""

    def head(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, split: Split | None = None
    ) -> ScalarHead:
        score = self.pretrained.get_submodule("score")
        assert isinstance(score, nn.Linear)
        return ScalarHead(hidden_ND, score.weight, score.bias, split)
