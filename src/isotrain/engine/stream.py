"""Stream the full weights of an engine as published files hold them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from isotrain.engine.engine import TrainingEngine
from isotrain.engine.offload import has_weights
from isotrain.models.conversion import Publisher, stored_buffers
from isotrain.models.lora import ADAPTER, base_name, is_adapter

_WRAPPED = ".base_layer.weight"


@torch.no_grad()
def full_weights(engine: TrainingEngine, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and shapes are those of published files: a fused parameter becomes one tensor per expert.

    Every rank must go through all of them: putting a weight together is a collective.

    Adapters are merged into their weights. A tensor may be the parameter itself: use it before the next step.
    """
    assert has_weights(engine), "the model is offloaded"
    publish = Publisher(engine.model.pretrained)
    for name, parameter in engine.parameters.items():
        if is_adapter(name):
            continue
        if name.endswith(_WRAPPED):
            tensor = _merged(engine, name).to(dtype)
        else:
            # Rounded before it is gathered: fewer bytes travel, and rounding each part is rounding the whole.
            tensor = _whole(parameter.detach().to(dtype), engine.world.device)
        yield from publish(base_name(name.removeprefix(engine.model.prefix)), tensor)
    for name, buffer in stored_buffers(engine.model.pretrained).items():
        yield from publish(base_name(name), buffer)  # in its own type, which engines keep as well


def _merged(engine: TrainingEngine, name: str) -> torch.Tensor:
    from peft.tuners.lora import LoraLayer  # not by processes that have no adapters

    # In float32: adding in a shorter type would lose updates below its resolution.
    layer_name = name.removesuffix(_WRAPPED)
    weight, down, up = (
        _whole(engine.parameters[f"{layer_name}{part}"].detach(), engine.world.device).float()
        for part in (_WRAPPED, f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight")
    )
    layer = engine.model.get_submodule(layer_name)
    assert isinstance(layer, LoraLayer)
    scaling: float = layer.scaling[ADAPTER]
    delta = (up @ down) * scaling
    # GPT-2's layers have inputs first.
    return weight + (delta.t() if getattr(layer, "fan_in_fan_out", False) else delta)


def _whole(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, where collectives are fast, also if weights are kept on the host."""
    tensor = tensor.to(device)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
