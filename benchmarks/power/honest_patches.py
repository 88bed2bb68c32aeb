"""Other ways to compute the same numbers, as kernels of other devices do: none of them is a mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Patch = Callable[[Any], None]


def _attention(change: Callable[..., Any]) -> Patch:
    def patch(attention: Any) -> None:
        attention._attend = change

    return patch


def _eager(query: Any, key: Any, value: Any, scaling: Any, dropout: float, window: Any) -> Any:
    """Scores, softmax and products one after the other, in float32."""
    import torch

    tokens, seen = query.shape[2], key.shape[2]
    mask = torch.ones(tokens, seen, dtype=torch.bool).tril(seen - tokens)
    if window is not None:
        mask = mask.triu(seen - tokens - window + 1)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query.float() * scale) @ key.transpose(2, 3)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value).to(query.dtype)


def _split_products(functional: Any) -> None:
    """Matrix products as sums of two halves, kept in float32 until they are added."""
    linear = functional.linear

    def split(input: Any, weight: Any, bias: Any = None) -> Any:
        half = weight.shape[-1] // 2
        if bias is not None or half < 8:
            return linear(input, weight, bias)
        one = linear(input[..., :half].float(), weight[..., :half].float())
        other = linear(input[..., half:].float(), weight[..., half:].float())
        return (one + other).to(input.dtype)

    functional.linear = split


def _norms(modeling: Any) -> None:
    """RMS norms with a root and a quotient, rounded once at the end, as fused kernels do."""
    for name in ("LlamaRMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm", "Gemma3RMSNorm"):
        kind = getattr(modeling, name, None)
        if kind is not None:
            kind.forward = _norm


def _norm(self: Any, hidden: Any) -> Any:
    wide = hidden.float()
    gemma = type(self).__name__.endswith("Gemma3RMSNorm")
    epsilon = self.eps if gemma else self.variance_epsilon
    gain = self.weight.float() + 1.0 if gemma else self.weight.float()
    root = ((wide * wide).sum(-1, keepdim=True) / wide.shape[-1] + epsilon).sqrt()
    return (wide / root * gain).to(hidden.dtype)


def _other_optimizer_kernel(build: Any) -> None:
    make = build.make_optimizer
    build.make_optimizer = lambda model, **options: make(model, **{**options, "fused": not options["fused"]})


_MODELING = tuple(f"transformers.models.{n}.modeling_{n}" for n in ("llama", "qwen3", "qwen3_moe", "gemma3"))

PATCHES: dict[str, dict[str, Patch]] = {
    "eager-attention": {"isotrain.models.attention": _attention(_eager)},
    "split-products": {"torch.nn.functional": _split_products},
    "other-norms": dict.fromkeys(_MODELING, _norms),
    "other-adam": {"isotrain.engine.build": _other_optimizer_kernel},
}
