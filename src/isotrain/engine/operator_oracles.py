"""What an operator should return: the same operator in float64 on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map


class NoOracleError(Exception):
    """The host cannot compute this operator in float64."""


def to_host(arguments: Any) -> Any:
    """A copy of an operator's arguments, in float64."""
    return tree_map(_to_host, arguments)


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # The host casts, because not every device has the type.
        host = value.detach().cpu()
        return host.double() if host.is_floating_point() and host.dtype != torch.float64 else host.clone()
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    return torch.device("cpu") if isinstance(value, torch.device) else value


def should_return(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The operator's result for arguments from `to_host`, to which it may write."""
    names = [argument.name for argument in func._schema.arguments]
    if "half_to_float" in names:  # of softmax: in float64 there is nothing to widen
        args = tuple(False if n == "half_to_float" else a for n, a in zip(names, args, strict=False))
    try:
        return func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if not is_attention(func):
            raise NoOracleError(str(func)) from error
    return (attention(**_bound(func, args, kwargs)),)


def is_attention(func: Any) -> bool:
    """Devices have attention kernels under names of their own, all with the same first arguments."""
    name = func._schema.name
    return name.startswith("aten::_scaled_dot_product_") and not name.endswith("_backward")


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """By its formula; keys and values may have fewer heads."""
    groups = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-1, -2) * factor
    mask = attn_mask if attn_mask is not None else attn_bias
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value


def _bound(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in func._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def least_norm(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """What a sum's norm would be if its terms had random signs; 0 for what is not a sum.

    Where terms cancel, a sum is as wrong as they let it be, however little is left of it.
    """
    if func._schema.name not in ("aten::sum", "aten::mean"):
        return 0.0
    sizes = func(args[0].abs(), *args[1:], **kwargs)
    terms = max(1.0, args[0].numel() / max(1, sizes.numel()))
    return float(sizes.norm()) / math.sqrt(terms)
