"""Gradient checkpointing and compilation of a model's layers."""

from __future__ import annotations

from collections.abc import Callable
from traceback import clear_frames
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from isotrain.errors import ModelError
from isotrain.models.load import layers_of


def checkpoint_layers(pretrained: PreTrainedModel, *, offload: bool) -> None:
    """Recompute each layer in the backward pass; `offload` keeps what that needs in host memory."""
    if not pretrained.supports_gradient_checkpointing:
        raise ModelError(
            f"model.gradient_checkpointing: model type '{pretrained.config.model_type}' does not support it; "
            "set it to false"
        )
    pretrained.gradient_checkpointing_enable({"use_reentrant": False})
    # As transformers' own `offload`, which not all versions that we support have.
    for module in pretrained.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _checkpoint_on_host if offload else _checkpoint  # type: ignore[assignment]


def _checkpoint(layer: Callable[..., Any], *inputs: Any) -> Any:
    try:
        return checkpoint(layer, *inputs, use_reentrant=False)
    except BaseException as error:
        # Before 2.13, torch's hooks stay as long as the frames of the error. In its backward pass, the next
        # model of this thread would then run this layer again, and fail with this error.
        clear_frames(error.__traceback__)
        raise


def _checkpoint_on_host(layer: Callable[..., Any], *inputs: Any) -> Any:
    # Only the layer's inputs pass these hooks: within the layer, checkpointing has its own.
    with saved_tensors_hooks(_to_host, _to_device):
        return _checkpoint(layer, *inputs)


def _to_host(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    # Copies are queued behind the work that needs them, and the device does not wait for the host.
    on_host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
    return tensor.device, on_host.copy_(tensor, non_blocking=True)


def _to_device(kept: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    device, on_host = kept
    return on_host.to(device, non_blocking=True)


def compile_layers(pretrained: PreTrainedModel) -> None:
    """Norms and MLPs, each by itself: attention over packed samples would be compiled anew for each batch.

    A mixture's MLPs stay as they are: how many tokens an expert gets is known only when it runs.
    """
    parts = [part for layer in layers_of(pretrained) for part in _parts(layer)]
    if not parts:
        raise ModelError(
            f"model.compile: no norm or MLP was found in the layers of {type(pretrained).__name__}; "
            "set it to false"
        )
    for part in parts:
        part.compile(dynamic=True)


def _parts(layer: nn.Module) -> list[nn.Module]:
    """Children that have no expert among their own."""
    return [
        child
        for name, child in layer.named_children()
        if ("norm" in name or "mlp" in name or "feed_forward" in name)
        and not any("expert" in inner for inner, _ in child.named_modules())
    ]
