"""Refuses models that would silently train wrongly here."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from isotrain.errors import ModelError
from isotrain.models.backbone import is_padded

# Our head is a plain projection; these scale or cap the logits after it.
_HEAD_EXTRAS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "logits_soft_cap",
    "output_logit_soft_cap",
)

# Layers that see nothing but the tokens their attention shows them.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def has_window(config: PretrainedConfig) -> bool:
    """Whether some layer attends to the last so many tokens only."""
    if layer_types := getattr(config, "layer_types", None):
        return "sliding_attention" in layer_types
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


def check_head(model: PreTrainedModel) -> None:
    kind = model.config.model_type
    for name in _HEAD_EXTRAS:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ModelError(f"model type '{kind}' scales its logits ({name}), which is not supported")
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"model type '{kind}' has no language-model head")
    if getattr(head, "bias", None) is not None:
        raise ModelError(f"model type '{kind}' has a head with a bias, which is not supported")


def check_score(model: PreTrainedModel) -> None:
    """Our classifiers' head is a plain projection of the last hidden states."""
    if not isinstance(getattr(model, "score", None), nn.Linear):
        kind = model.config.model_type
        raise ModelError(f"model type '{kind}' has no plain 'score' head, which a classifier needs")


def check_packing(model: PreTrainedModel, attention: str) -> None:
    """Packed samples lie side by side: nothing but attention, which knows their borders, may mix tokens."""
    kind = model.config.model_type
    takes_function = getattr(model, "_supports_attention_backend", False)
    if attention == "fused-padded" and not takes_function:
        raise ModelError(f"model type '{kind}' does not take an attention function; set model.fused=off")
    if is_padded(attention):
        return
    others = set(getattr(model.config, "layer_types", None) or ()) - _ATTENTION_LAYERS
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
