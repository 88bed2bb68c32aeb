"""Layers of a Hugging Face model over a device's fused operators, where the layer is of a known kind.

A layer is known when it has the parts of its kind *and* its own forward, run on a few random numbers, gives
what the kind is defined to give: RMSNorms that add 1 to their weight, other activations or rotations do not.

Queries and keys are turned by a function of the model's module; `replace_rotation` gives one layer another
one. transformers' hooks for such functions (`use_kernelized_func`) do nothing without the `kernels` package,
and with it take code from the Hub or a directory, not a function. The forward is that of the class, word for
word, with the one global name bound anew; class and module are left alone, and with them all other models.

S: samples, L: tokens, H: heads, D: head size, I: intermediate size.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, __version__

from isotrain.device.base import FusedOperators

NAME = "apply_rotary_pos_emb"
# The bounds of pyproject.toml: a new version is looked at before it is let in.
FIRST, BELOW = (5, 5), (5, 20)
VERSION = tuple(int(number) for number in __version__.split(".")[:2])

Rotate = Callable[..., Any]


def rotation_of(layer: nn.Module) -> Rotate | None:
    """The function by which an attention layer turns queries and keys; None where it cannot be replaced."""
    forward = type(layer).forward
    if not FIRST <= VERSION < BELOW or not isinstance(forward, FunctionType):
        return None
    loads = (step for step in dis.get_instructions(forward) if step.opname == "LOAD_GLOBAL")
    function = forward.__globals__.get(NAME) if any(step.argval == NAME for step in loads) else None
    return function if callable(function) else None


def replace_rotation(layer: nn.Module, rotate: Rotate) -> None:
    """`rotate` takes what `rotation_of` takes."""
    forward = type(layer).forward
    assert isinstance(forward, FunctionType)
    names = {**forward.__globals__, NAME: rotate}
    rotated_forward = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    rotated_forward.__kwdefaults__ = forward.__kwdefaults__
    layer.forward = MethodType(rotated_forward, layer)


LAYERS = ("rms_norm", "swiglu", "rotary")
ROTATION = ["q", "k", "cos", "sin", "unsqueeze_dim"]


@dataclass(frozen=True)
class Fused:
    """Which operators a model runs on, and which of its layers stayed as they were."""

    operators: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    """Classes of layers that are of no known kind."""

    def __str__(self) -> str:
        left = f" (unsupported layers: {', '.join(self.unknown)})" if self.unknown else ""
        return (", ".join(self.operators) or "none") + left


NONE_FUSED = Fused()


def fuse_layers(model: PreTrainedModel, table: FusedOperators) -> Fused:
    """Give the layers that are known a forward of their own; parameters and names stay as they are."""
    turns = _rotates_whole_heads(model)
    used: set[str] = set()
    unknown: set[str] = set()
    for layer in model.modules():
        kind = type(layer).__name__
        if "RMSNorm" in kind:
            operator, known = "rms_norm", _is_rms_norm(layer)
        elif kind.endswith("MLP"):
            operator, known = "swiglu", _is_swiglu(layer)
        elif kind.endswith("Attention"):
            operator, known = "rotary", turns and _is_rotated_by_halves(layer)
        else:
            continue
        if known:
            _REPLACE[operator](layer, table)
            used.add(operator)
        else:
            unknown.add(kind)
    return Fused(tuple(name for name in LAYERS if name in used), tuple(sorted(unknown)))


def _fuse_rms_norm(norm: Any, table: FusedOperators) -> None:
    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        return table.rms_norm(hidden_states, norm.weight, norm.variance_epsilon)

    norm.forward = forward


def _fuse_swiglu(mlp: Any, table: FusedOperators) -> None:
    # The operator wants both halves in one tensor. The projections' outputs are joined, never their weights:
    # those keep names, shards and adapters. The backward pass keeps the copy, and its parts no more.
    def forward(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = mlp.down_proj(table.swiglu(torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], -1)))
        return result

    mlp.forward = forward


def _fuse_rotary(attention: nn.Module, table: FusedOperators) -> None:
    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos_SLD: torch.Tensor, sin_SLD: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, ...]:
        # Tokens before heads is how the projections left them: nothing is copied.
        cos_SL1D, sin_SL1D = cos_SLD.unsqueeze(2), sin_SLD.unsqueeze(2)
        return tuple(
            table.rotary(x.transpose(unsqueeze_dim, 2), cos_SL1D, sin_SL1D).transpose(unsqueeze_dim, 2)
            for x in (q, k)
        )

    replace_rotation(attention, rotate)


_REPLACE: dict[str, Callable[[Any, FusedOperators], None]] = {
    "rms_norm": _fuse_rms_norm,
    "swiglu": _fuse_swiglu,
    "rotary": _fuse_rotary,
}


def _is_rms_norm(layer: Any) -> bool:
    if not (_has_parts(layer, parameters={"weight"}) and hasattr(layer, "variance_epsilon")):
        return False
    # Small numbers among them, so that epsilon counts.
    x, weight = _random(4, 8) * torch.tensor([1.0, 1e-2, 1e-3, 10.0])[:, None], _random(8)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + layer.variance_epsilon) * weight
    return _computes(lambda: _stand_in(layer, {"weight": weight}, {})(x), expected)


def _is_swiglu(layer: Any) -> bool:
    if not _has_parts(layer, modules={"gate_proj", "up_proj", "down_proj", "act_fn"}):
        return False
    x, gate_ID, up_ID, down_DI = _random(3, 8), _random(6, 8), _random(6, 8), _random(8, 6)
    linears = {"gate_proj": gate_ID, "up_proj": up_ID, "down_proj": down_DI}
    parts = {**{name: _linear(weight) for name, weight in linears.items()}, "act_fn": layer.act_fn}
    expected = (F.silu(x @ gate_ID.T) * (x @ up_ID.T)) @ down_DI.T
    return _computes(lambda: _stand_in(layer, {}, parts)(x), expected)


def _rotates_whole_heads(model: PreTrainedModel) -> bool:
    """Whether every rotary embedding turns whole heads and scales nothing: operators want cosines up to 1."""
    embeddings = [layer for layer in model.modules() if type(layer).__name__.endswith("RotaryEmbedding")]
    heads = {layer.head_dim for layer in model.modules() if hasattr(layer, "head_dim")}
    return bool(embeddings) and all(
        getattr(layer, "attention_scaling", None) == 1.0
        and isinstance(frequencies := getattr(layer, "inv_freq", None), torch.Tensor)
        and heads == {2 * len(frequencies)}
        for layer in embeddings
    )


def _is_rotated_by_halves(layer: nn.Module) -> bool:
    rotate = rotation_of(layer)
    if rotate is None or list(inspect.signature(rotate).parameters) != ROTATION:
        return False
    q_SHLD, k_SHLD = _random(1, 2, 5, 8), _random(1, 1, 5, 8)
    angle_SLD = _random(1, 5, 4).repeat(1, 1, 2)
    cos, sin = angle_SLD.cos(), angle_SLD.sin()

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    expected = torch.cat([turned(q_SHLD), turned(k_SHLD)], 1)
    return _computes(lambda: torch.cat(rotate(q_SHLD, k_SHLD, cos, sin), 1), expected)


def _has_parts(layer: nn.Module, parameters: Iterable[str] = (), modules: Iterable[str] = ()) -> bool:
    """Exactly these, and a forward that takes one tensor."""
    return (
        set(layer._parameters) == set(parameters)
        and set(layer._modules) == set(modules)
        and not layer._buffers
        and len(inspect.signature(type(layer).forward).parameters) == 2
    )


def _stand_in(layer: nn.Module, parameters: dict[str, Any], modules: dict[str, Any]) -> nn.Module:
    """A small layer that computes as this one does, whose own weights have no memory yet."""
    kind = type(layer)
    small = kind.__new__(kind)
    small.__dict__ = {**layer.__dict__, "_parameters": parameters, "_modules": modules}
    return small


def _linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _random(*shape: int) -> torch.Tensor:
    """The same numbers each time; torch's own generator, which dropout draws from, is left alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@torch.no_grad()
def _computes(compute: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
    try:
        result = compute()
    except Exception:  # whatever it is that the layer needs: its kind is not known
        return False
    return result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-4, atol=1e-5)
