"""From recipe sections to a training engine: configuration ends here."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig

from isotrain.device.base import Device
from isotrain.engine.engine import TrainingEngine, make_optimizer
from isotrain.engine.sharding import shard_model
from isotrain.engine.world import World
from isotrain.errors import ModelError
from isotrain.models.load import build_causal_lm, materialise, model_directory, move_buffers, read_config
from isotrain.models.lora import add_adapters, base_name, initialise_adapters, is_adapter, lora_config
from isotrain.models.packed import PackedModel
from isotrain.models.suitability import has_window
from isotrain.models.weights import WeightFiles, load_weights
from isotrain.recipe.schema import LoraSection, ModelSection, OptimizerSection

# Where the Hugging Face model sits inside ours: stripped from names in files.
PREFIX = "causal_lm."


def build_engine(
    model: ModelSection, optimizer: OptimizerSection, *, device: Device, world: World, seed: int
) -> TrainingEngine:
    """A model sharded over the world, its weights loaded, ready to train."""
    directory = model_directory(model.path)
    packed = _build_model(directory, model, device)
    dtype = getattr(torch, model.dtype)
    if model.lora.rank:
        add_adapters(packed.causal_lm, adapter_config(model.lora), frozen_dtype=dtype)
    if model.gradient_checkpointing:
        packed.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    move_buffers(packed, world.device)
    shard_model(packed, world, dtype)
    materialise(packed, world.device)
    packed.causal_lm.tie_weights()  # giving memory to meta parameters makes two of a shared one
    named = [(name.removeprefix(PREFIX), p) for name, p in packed.named_parameters()]
    load_weights(
        [(base_name(name), p) for name, p in named if not is_adapter(name)],
        WeightFiles(directory),
    )
    initialise_adapters([(name, p) for name, p in named if is_adapter(name)], seed)
    adamw = make_optimizer(
        packed,
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        fused=device.fused_adamw,
    )
    return TrainingEngine(packed, adamw, world, optimizer.clip_norm)


def _build_model(directory: Path, model: ModelSection, device: Device) -> PackedModel:
    # The flash kernels have no float32, and on some devices transformers' do not pass a window on.
    windowed = has_window(read_config(directory)) and not device.flash_window
    attention = model.attention
    if attention == "auto":
        flash = device.flash_attention and model.dtype != "float32" and not windowed
        attention = "flash" if flash else "segments"
    if attention == "flash" and not device.flash_attention:
        raise ModelError(
            f"model.attention: no flash attention for '{device.type}' here; use auto or segments"
        )
    if attention == "flash" and windowed:
        raise ModelError(
            f"model.attention: flash attention on '{device.type}' ignores this model's sliding window; "
            "use auto or segments"
        )
    return PackedModel(build_causal_lm(directory, attention), attention, model.head_chunk)


def adapter_config(lora: LoraSection) -> LoraConfig:
    return lora_config(lora.rank, lora.alpha, lora.targets, lora.dropout)
