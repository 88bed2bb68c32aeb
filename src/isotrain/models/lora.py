"""Low-rank adapters through peft, initialised alike whatever the number of ranks."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from isotrain.errors import ModelError
from isotrain.models.config import number_of_experts
from isotrain.models.vision import TOWER_MODULES, sees
from isotrain.models.weights import shard_of

# peft takes most of a second to import, in every process: only those with adapters do.
if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"
ALL = "all-linear"


def lora_config(rank: int, alpha: int, targets: str | list[str], dropout: float) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        lora_dropout=dropout,
        task_type="CAUSAL_LM",
        bias="none",
    )


def add_adapters(model: PreTrainedModel, config: LoraConfig, frozen_dtype: torch.dtype) -> None:
    """Insert adapters (float32, on the meta device) and freeze everything else in the compute type."""
    from peft import inject_adapter_in_model
    from peft.tuners.lora.layer import ParamWrapper

    if sees(model.config):
        config.exclude_modules = TOWER_MODULES  # its layers' names end as those of the language model
    _check_targets(model, config.target_modules)
    if number_of_experts(model.config) and config.target_modules == ALL:
        # peft would also take the experts and the router, which we cannot merge.
        config.target_modules = sorted(attention_layers(model))
    with init_empty_weights(include_buffers=False):
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    if any(isinstance(module, ParamWrapper) for module in model.modules()):
        raise ModelError(
            "model.lora.targets: adapters on the experts of a mixture are not supported; use some of: "
            + ", ".join(sorted(attention_layers(model)))
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        parameter.data = parameter.data.to(torch.float32 if is_adapter(name) else frozen_dtype)


def _check_targets(model: PreTrainedModel, targets: str | Collection[str] | None) -> None:
    """Each name must be a linear layer of the model; peft leaves a misspelt one out if another one fits."""
    if targets is None or isinstance(targets, str):
        return  # `all-linear`, which leaves the head out by itself
    head = model.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)  # GPT-2's linear layers are the latter
    linear = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    if sees(model.config):
        linear = {name: module for name, module in linear.items() if not re.fullmatch(TOWER_MODULES, name)}
    known = sorted({name.rpartition(".")[2] for name, module in linear.items() if module is not head})
    for target in targets:
        matches = [module for name, module in linear.items() if name == target or name.endswith(f".{target}")]
        if not matches or head in matches:
            raise ModelError(
                f"model.lora.targets: '{target}' cannot have an adapter; use some of: {', '.join(known)}"
            )


def attention_layers(model: nn.Module) -> set[str]:
    """Last parts of the names of attention's linear layers."""
    return {
        name.rpartition(".")[2]
        for attention in model.modules()
        if type(attention).__name__.endswith("Attention")
        for name, layer in attention.named_modules()
        if isinstance(layer, nn.Linear) and ".lora_" not in f".{name}" and not name.endswith("base_layer")
    }


def adapted_layers(names: Iterable[str]) -> set[str]:
    """Last parts of the names of the layers that these adapter weights belong to."""
    return {name.partition(".lora_")[0].rpartition(".")[2] for name in names if is_adapter(name)}


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """The name a wrapped weight has in the model without adapters."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def initialise_adapters(parameters: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """A: Kaiming-uniform, B: zero, as peft does; each drawn on the host from a seed of its own name.

    Neither the number of ranks, nor the device, nor the order of the modules changes the numbers.
    """
    for name, parameter in parameters:
        shard = shard_of(parameter)
        if ".lora_B." in name:
            shard.local.zero_()
            continue
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        whole = torch.empty(shard.shape)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        shard.local.copy_(whole[shard.part()])


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The base model, exactly: its layers run as if they carried no adapters.

    peft's own switch would also freeze and thaw the adapters, which sharding has taken note of.
    """
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled
