"""Compile what the layers of a model do around attention."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from isotrain.errors import ModelError
from isotrain.models.load import layers_of


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
