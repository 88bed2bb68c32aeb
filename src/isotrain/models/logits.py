"""Scale and soft cap that some models apply to their logits, read from what their own forward computes.

L: tokens, D: hidden size, K: outputs of a small head, V: vocabulary, C: tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from isotrain.errors import ModelError
from isotrain.models.config import text_config


@dataclass(frozen=True)
class LogitTransform:
    """From the head's products to logits: `cap * tanh(scale * product / cap)`."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, products_CV: torch.Tensor) -> torch.Tensor:
        """The logits, in the products' memory where nothing needs them for a gradient."""
        if self.scale != 1.0:
            products_CV = products_CV.mul_(self.scale)
        if self.cap is None:
            return products_CV
        tanh_CV = products_CV.div_(self.cap).tanh_()
        # The gradient of a tanh is made of its result.
        return tanh_CV * self.cap if tanh_CV.requires_grad else tanh_CV.mul_(self.cap)

    def slopes(self, logits_CV: torch.Tensor) -> torch.Tensor | float:
        """Derivatives of logits by products, from the logits."""
        if self.cap is None:
            return self.scale
        return (logits_CV / self.cap).square_().neg_().add_(1).mul_(self.scale)


PLAIN = LogitTransform()

# Fields that say so, for the message alone: what a model does is seen from what it computes.
_STATED = (
    *("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "unpadded_vocab_size"),
    *("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier", "dim_model_base"),
)
# Sizes of the products that a model is tried with: in the straight part of any tanh, between, and beyond it.
_SIZES = (1e-6, 0.1, 1.0, 10.0, 100.0, 1e3, 1e9)
# Models that compute their logits in float32 round their scale so much.
_ROUNDING = 2.0**-24


def read_transform(model: PreTrainedModel) -> LogitTransform:
    """The transform that makes our head's logits those of the model's own forward, or an error."""
    kind = model.config.model_type
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"model type '{kind}' has no language-model head")
    if getattr(head, "bias", None) is not None:
        raise ModelError(f"model type '{kind}' has a head with a bias, which is not supported")
    check_body(model)
    transform = _measured(model, head)
    if transform is None:
        text = text_config(model)
        stated = [name for name in _STATED if getattr(text, name, None) not in (None, 1, 1.0)]
        raise ModelError(
            f"model type '{kind}' changes its logits ({', '.join(stated) or 'in its forward'}) by more than "
            "a scale and a soft cap, which is not supported"
        )
    return transform


def check_body(model: PreTrainedModel) -> None:
    """Models run without their heads here; transformers gives the whole where it knows no such part."""
    if model.base_model is model:
        raise ModelError(
            f"model type '{model.config.model_type}' cannot be run without its head, which is not supported"
        )


@torch.no_grad()
def _measured(model: PreTrainedModel, head: nn.Module) -> LogitTransform | None:
    """Scale and cap, if with them all logits of the model's own forward come out; None if not.

    Its layers are left out: the forward gets our hidden states, and a head of few outputs.
    """
    weight_VD = head.weight
    assert isinstance(weight_VD, torch.Tensor)
    generator = torch.Generator().manual_seed(0)
    size_L1 = torch.tensor(_SIZES, dtype=torch.float64)[:, None]
    direction_LD = torch.randn(len(_SIZES), weight_VD.shape[1], generator=generator, dtype=torch.float64)
    small_KD = torch.randn(8, weight_VD.shape[1], generator=generator, dtype=torch.float64)
    hidden_1LD = (size_L1 * direction_LD / weight_VD.shape[1] ** 0.5)[None]
    try:
        logits_1LK = _own_logits(model, head, hidden_1LD, small_KD)
        # With the real head on the meta device: a model may leave out a part of its vocabulary.
        meta_1LD, meta_VD = (x.to("meta", torch.float32) for x in (hidden_1LD, weight_VD.detach()))
        logits_1LV = _own_logits(model, head, meta_1LD, meta_VD)
    except Exception:  # whatever else it is that the forward needs: it is no such transform
        return None
    products_1LK = F.linear(hidden_1LD, small_KD)
    if logits_1LK.shape != products_1LK.shape or logits_1LV.shape[-1] != len(weight_VD):
        return None
    logits_1LK = logits_1LK.double()
    scale = _decimal(float((logits_1LK[0, 0] / products_1LK[0, 0]).median()))
    if scale == 0 or not isfinite(scale):
        return None
    largest = float(logits_1LK[0, -1].abs().median())
    for transform in (LogitTransform(scale), LogitTransform(scale, _decimal(largest))):
        if torch.allclose(transform(products_1LK.clone()), logits_1LK, rtol=1e-6, atol=0.0):
            return transform
    return None


def _decimal(measured: float) -> float:
    """The shortest decimal number that a model which rounds to float32 can have been told."""
    shortened = (float(f"{measured:.{digits}g}") for digits in range(1, 18))
    return next((x for x in shortened if abs(x - measured) <= _ROUNDING * abs(measured)), measured)


def _own_logits(
    model: PreTrainedModel, head: nn.Module, hidden_1LD: torch.Tensor, weight_KD: torch.Tensor
) -> torch.Tensor:
    """The logits of the model's own forward, with given hidden states instead of its layers'."""
    projection = nn.Linear(weight_KD.shape[1], weight_KD.shape[0], bias=False, device="meta")
    projection.weight = nn.Parameter(weight_KD, requires_grad=False)
    parts: dict[str, nn.Module] = {
        name: _FixedOutput(hidden_1LD) if part is model.base_model else projection if part is head else part
        for name, part in model._modules.items()
        if part is not None
    }
    kind = type(model)
    small = kind.__new__(kind)
    small.__dict__ = {**model.__dict__, "_modules": parts, "training": False}
    tokens_1L = torch.ones(hidden_1LD.shape[:2], dtype=torch.long, device=hidden_1LD.device)
    logits: torch.Tensor = small(input_ids=tokens_1L, use_cache=False).logits
    return logits


class _FixedOutput(nn.Module):
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
