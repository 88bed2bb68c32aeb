"""Refuses models that would silently train wrongly here.

L: tokens, D: hidden size, K: outputs of a small head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from isotrain.errors import ModelError
from isotrain.models.backbone import is_padded
from isotrain.models.config import layer_kinds, text_config

# Fields that say so, for the message alone: whether a model does it is seen from what it computes.
_HEAD_EXTRAS = (
    *("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "unpadded_vocab_size"),
    *("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier", "dim_model_base"),
)

# Layers that see nothing but the tokens their attention shows them.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def check_head(model: PreTrainedModel) -> None:
    """Our head is a plain projection of the last hidden states; some models scale or cap what it gives."""
    kind = model.config.model_type
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"model type '{kind}' has no language-model head")
    if getattr(head, "bias", None) is not None:
        raise ModelError(f"model type '{kind}' has a head with a bias, which is not supported")
    _check_body(model)
    if not _is_plain_projection(model, head):
        text = text_config(model)
        stated = [name for name in _HEAD_EXTRAS if getattr(text, name, None) not in (None, 1, 1.0)]
        raise ModelError(
            f"model type '{kind}' scales or caps its logits ({', '.join(stated) or 'in its forward'}), "
            "which is not supported"
        )


def check_score(model: PreTrainedModel) -> None:
    """Our classifiers' head is a plain projection of the last hidden states."""
    if not isinstance(getattr(model, "score", None), nn.Linear):
        kind = model.config.model_type
        raise ModelError(f"model type '{kind}' has no plain 'score' head, which a classifier needs")
    _check_body(model)


def _check_body(model: PreTrainedModel) -> None:
    """Models run without their heads here; transformers gives the whole where it knows no such part."""
    if model.base_model is model:
        raise ModelError(
            f"model type '{model.config.model_type}' cannot be run without its head, which is not supported"
        )


@torch.no_grad()
def _is_plain_projection(model: PreTrainedModel, head: Any) -> bool:
    """Whether the model's own forward makes of hidden states what our head does.

    Its layers are left out: the forward gets our hidden states, and a head of few outputs. The numbers are
    large enough for a soft cap to show.
    """
    weight_VD = head.weight
    generator = torch.Generator().manual_seed(0)
    hidden_1LD = 30 * torch.randn(1, 3, weight_VD.shape[1], generator=generator)
    small_KD = torch.randn(8, weight_VD.shape[1], generator=generator) / weight_VD.shape[1] ** 0.5
    try:
        logits_1LK = _own_logits(model, head, hidden_1LD, small_KD)
        # With the real head on the meta device: a model may leave out a part of its vocabulary.
        logits_1LV = _own_logits(model, head, hidden_1LD.to("meta"), weight_VD.detach().to("meta"))
    except Exception:  # whatever else it is that the forward needs: it is no plain projection
        return False
    expected_1LK = F.linear(hidden_1LD, small_KD)
    return (
        logits_1LK.shape == expected_1LK.shape
        and torch.allclose(logits_1LK.float(), expected_1LK, rtol=1e-4, atol=1e-4)
        and logits_1LV.shape[-1] == len(weight_VD)
    )


def _own_logits(
    model: PreTrainedModel, head: nn.Module, hidden_1LD: torch.Tensor, weight_KD: torch.Tensor
) -> torch.Tensor:
    """The logits of the model's own forward, with given hidden states instead of its layers'."""
    projection = nn.Linear(weight_KD.shape[1], weight_KD.shape[0], bias=False, device="meta")
    projection.weight = nn.Parameter(weight_KD, requires_grad=False)
    parts: dict[str, nn.Module] = {
        name: _Given(hidden_1LD) if part is model.base_model else projection if part is head else part
        for name, part in model._modules.items()
        if part is not None
    }
    kind = type(model)
    small = kind.__new__(kind)
    small.__dict__ = {**model.__dict__, "_modules": parts, "training": False}
    tokens_1L = torch.ones(hidden_1LD.shape[:2], dtype=torch.long, device=hidden_1LD.device)
    logits: torch.Tensor = small(input_ids=tokens_1L, use_cache=False).logits
    return logits


class _Given(nn.Module):
    """Stands for a model's layers, and gives what it was given."""

    def __init__(self, hidden_1LD: torch.Tensor) -> None:
        super().__init__()
        self.last_hidden_state = hidden_1LD

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(self.last_hidden_state)

    def __getattr__(self, name: str) -> Any:
        # Some models call a part of their layers, such as the decoder.
        return self if name == "decoder" else super().__getattr__(name)


class _Output:
    """Hidden states, and nothing of all else that some models give besides."""

    def __init__(self, hidden_1LD: torch.Tensor) -> None:
        self.last_hidden_state = hidden_1LD

    def __getitem__(self, place: int) -> torch.Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


def check_packing(model: PreTrainedModel, attention: str) -> None:
    """Packed samples lie side by side: nothing but attention, which knows their borders, may mix tokens."""
    kind = model.config.model_type
    takes_function = getattr(model, "_supports_attention_backend", False)
    if attention == "fused-padded" and not takes_function:
        raise ModelError(f"model type '{kind}' does not take an attention function; set model.fused=off")
    if is_padded(attention):
        return
    others = layer_kinds(model.config) - _ATTENTION_LAYERS
    if others or getattr(model, "_is_stateful", False):
        what = ", ".join(sorted(others)) or "recurrent"
        raise ModelError(
            f"model type '{kind}' has layers ({what}) that would mix packed samples; "
            "set model.attention=padded"
        )
    if not takes_function:
        raise ModelError(
            f"model type '{kind}' does not take an attention function; set model.attention=padded"
        )
