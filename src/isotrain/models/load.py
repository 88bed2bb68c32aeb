"""Hugging Face models in: built without memory, then filled shard by shard from safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
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
from isotrain.models.shards import shard_of

# transformers' name for each of ours.
IMPLEMENTATIONS = {"segments": SEGMENTS, "flash": "flash_attention_2", "padded": "sdpa"}

# The head is computed here rather than by the model: models that do more than a projection are refused.
_HEAD_EXTRAS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


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


def build_causal_lm(directory: Path, attention: str) -> PreTrainedModel:
    """The model of a directory, its parameters on the meta device in float32, its buffers real."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    _check_head(config)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=IMPLEMENTATIONS[attention],
            trust_remote_code=False,
        )
    model.tie_weights()
    return model


def _check_head(config: PretrainedConfig) -> None:
    for name in _HEAD_EXTRAS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ModelError(
                f"model type '{config.model_type}' scales its logits ({name}), which is not supported"
            )


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Bring the real buffers to the device, before sharding: it would assign across device types."""
    module._apply(lambda t: t if t.is_meta else t.to(device))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory on the device: after sharding, each rank its own part only."""
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


class WeightFiles:
    """The safetensors files of a model directory, read slice by slice."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, Any] = {}
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            self.file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (directory / "model.safetensors").is_file():
            with safe_open(directory / "model.safetensors", "pt") as file:
                self.file_of = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise ModelError(
                f"{directory} has no model.safetensors; convert the weights, pickled ones are never loaded"
            )

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        file_name = self.file_of[name]
        if Path(file_name).name != file_name:
            raise ModelError(
                f"{self.directory}: the weight index points outside the directory ('{file_name}')"
            )
        if file_name not in self._open:
            self._open[file_name] = safe_open(self.directory / file_name, "pt")
        tensor: torch.Tensor = self._open[file_name].get_slice(name)[part]
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        self.read(name, (slice(0, 0),))
        return tuple(self._open[self.file_of[name]].get_slice(name).get_shape())


@torch.no_grad()
def load_weights(parameters: Iterable[tuple[str, nn.Parameter]], files: WeightFiles) -> None:
    """Fill each parameter's local shard from the tensor of the same name."""
    for name, parameter in parameters:
        if name not in files.file_of:
            raise ModelError(f"{files.directory}: no weights for '{name}'; is this a causal language model?")
        shard = shard_of(parameter)
        if files.shape(name) != shard.shape:
            raise ModelError(
                f"{files.directory}: '{name}' is {files.shape(name)}, the configuration says {shard.shape}"
            )
        shard.local.copy_(files.read(name, shard.part()))


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return tokenizer
