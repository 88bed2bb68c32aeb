"""Hugging Face models in, built without memory for their weights."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from isotrain.errors import ModelError
from isotrain.models.attention import SEGMENTS
from isotrain.models.suitability import check_head, check_packing

# transformers' name for each of ours.
IMPLEMENTATIONS = {"segments": SEGMENTS, "flash": "flash_attention_2", "padded": "sdpa"}


def model_directory(path: str) -> Path:
    """A local directory as it is; a Hub name is downloaded (safetensors only, never pickled weights)."""
    local = Path(path).expanduser()
    if (local / "config.json").is_file():
        return local
    if local.exists() or path.startswith((".", "/", "~")):
        raise ModelError(f"model.path: '{path}' has no config.json; give a Hugging Face model directory")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception as error:  # the Hub client raises many kinds; all mean the same to the user
        raise ModelError(
            f"model.path: '{path}' is neither a local model directory nor reachable on the Hub ({error})"
        ) from error


def read_config(directory: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory}/config.json cannot be used: {error}") from error
    return config


def build_causal_lm(directory: Path, attention: str) -> PreTrainedModel:
    """The model of a directory, its parameters on the meta device in float32, its buffers real."""
    config = read_config(directory)
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=IMPLEMENTATIONS[attention],
                trust_remote_code=False,
            )
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"{directory}: no causal language model for attention '{attention}': {error}"
        ) from error
    check_head(model)
    check_packing(model, attention)
    model.tie_weights()
    return model


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Bring the real buffers to the device, before sharding: it would assign across device types."""
    module._apply(lambda t: t if t.is_meta else t.to(device))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory on the device: after sharding, each rank its own part only."""
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return tokenizer
