"""Build Hugging Face models without memory for their weights; refuse those that would train wrongly here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from isotrain.errors import ModelError
from isotrain.models.attention import FLASH, FUSED, FUSED_PADDED, NO_FLASH, SEGMENTS, is_padded
from isotrain.models.config import attention_cap, layer_kinds, number_of_experts, text_config
from isotrain.models.logits import check_body
from isotrain.models.mixers import KIND, mixers_of
from isotrain.models.vision import sees

# transformers' name for each of ours.
IMPLEMENTATIONS = {
    "sdpa": SEGMENTS,
    "flash": FLASH,
    "padded": "sdpa",
    "fused": FUSED,
    "fused-padded": FUSED_PADDED,
}

# Attention, or experts one after the other, in plain operators.
EAGER = "eager"


def read_config(directory: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{directory}/config.json cannot be used: {error}") from error
    if getattr(config, "quantization_config", None):
        # Its numbers mean nothing without scales that stand beside them.
        raise ModelError(f"{directory} is quantized; set a directory with the weights in bfloat16 or float32")
    return config


def build_causal_lm(directory: Path, attention: str, experts: str = EAGER) -> PreTrainedModel:
    """The model of a directory, its parameters on the meta device in float32, its buffers real."""
    config = read_config(directory)
    model = _from_config(
        language_model(config),
        config,
        attention,
        experts,
        f"{directory}: cannot build a causal language model",
    )
    check_packing(model, attention)
    model.tie_weights()
    return model


def language_model(config: PretrainedConfig) -> Any:
    """transformers' class for models that write text."""
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def build_scalar(directory: Path, attention: str, experts: str = EAGER) -> PreTrainedModel:
    """The directory's model as a sequence classifier with one label, built like the causal one."""
    return _classifier(
        AutoModelForSequenceClassification, "sequence", directory, attention, experts, labels=1
    )


def build_token_classifier(directory: Path, attention: str, experts: str = EAGER) -> PreTrainedModel:
    """The directory's model as a token classifier with two labels, bad and good."""
    return _classifier(AutoModelForTokenClassification, "token", directory, attention, experts, labels=2)


def _classifier(
    kind: Any, of: str, directory: Path, attention: str, experts: str, labels: int
) -> PreTrainedModel:
    config = read_config(directory)
    config.num_labels = labels
    model = _from_config(kind, config, attention, experts, f"{directory}: cannot build a {of} classifier")
    check_score(model)
    check_packing(model, attention)
    return model


def _from_config(
    kind: Any, config: PretrainedConfig, attention: str, experts: str, complaint: str
) -> PreTrainedModel:
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = kind.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=_implementations(config, attention),
                # transformers refuses the others for a model without experts.
                experts_implementation=experts if number_of_experts(config) else EAGER,
                trust_remote_code=False,
            )
    except (ValueError, KeyError) as error:
        raise ModelError(f"{complaint} with attention '{attention}': {error}") from error
    keep_attention_cap(model)
    return model


def _implementations(config: PretrainedConfig, attention: str) -> str | dict[str, str]:
    """By part of a composite model: our attention is causal, and a vision tower's is not."""
    text = IMPLEMENTATIONS[attention]
    return {"": text, "text_config": text, "vision_config": "sdpa"} if sees(config) else text


def keep_attention_cap(model: PreTrainedModel) -> None:
    """transformers' SDPA leaves a soft cap of attention's scores out, without a word."""
    if attention_cap(model.config) and text_config(model)._attn_implementation == "sdpa":
        model.set_attn_implementation(EAGER)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers, as transformers names their classes; empty where it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Bring the real buffers to the device, before sharding: it would assign across device types."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                part._buffers[name] = buffer.to(device)


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory on the device: after sharding, each rank its own part only."""
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


# Layers that see nothing but the tokens their attention shows them.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def check_score(model: PreTrainedModel) -> None:
    """Our classifiers' head is a plain projection of the last hidden states."""
    if not isinstance(getattr(model, "score", None), nn.Linear):
        kind = model.config.model_type
        raise ModelError(f"model type '{kind}' has no plain 'score' head, which a classifier needs")
    check_body(model)


def check_packing(model: PreTrainedModel, attention: str) -> None:
    """Packed samples lie side by side: nothing but attention, which knows their borders, may mix tokens."""
    kind = model.config.model_type
    takes_function = getattr(model, "_supports_attention_backend", False)
    if attention == "fused-padded" and not takes_function:
        raise ModelError(f"model type '{kind}' does not take an attention function; set model.fused=off")
    if is_padded(attention):
        return
    others = layer_kinds(model.config) - _ATTENTION_LAYERS
    if others == {KIND} and mixers_of(model):
        if attention == "flash":
            raise ModelError(f"model type '{kind}' has layers ({KIND}) beside attention; {NO_FLASH}")
        return  # which are given one sample after the other
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
