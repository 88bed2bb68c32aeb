"""Results that an operator should return: those of the same operator in float64 on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


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
    """Norm that a sum would have if its terms had random signs; 0 for other operators.

    Where terms cancel, a sum is as wrong as they let it be, however little is left of it.
    """
    if func._schema.name not in ("aten::sum", "aten::mean"):
        return 0.0
    sizes = func(args[0].abs(), *args[1:], **kwargs)
    terms = max(1.0, args[0].numel() / max(1, sizes.numel()))
    return float(sizes.norm()) / math.sqrt(terms)


LARGEST = 2**26
"""Elements of all tensors of one comparison: half a gibibyte in float64."""

_SOFTMAX = {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"}


def _itself(output: Any) -> Any:
    return output


@dataclass(frozen=True)
class Part:
    """Arguments are views of the call's own, so that they show what the operator writes to these."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    of_output: Callable[[Any], Any] = _itself


def part_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], largest: int = LARGEST
) -> Part | None:
    """The whole call where it is small enough, else a part of it; None where no part is known to be exact."""
    name = func._schema.name.partition("::")[2]
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    made = 0 if func._schema.is_mutable else _output_elements(func, name, args, given)
    if sum(t.numel() for t in given) + made <= largest:
        return Part(args, kwargs)
    if name.startswith(("_foreach_", "_fused_adam")):
        return _of_lists(args, kwargs, largest)
    if name in ("mm", "bmm"):
        return _of_product(args, kwargs, largest)
    if torch.Tag.pointwise in func.tags:
        return _of_rows(args, kwargs, given, largest, whole=None)
    if name in _SOFTMAX:
        return _of_rows(args, kwargs, given, largest, whole=int(args[1 + ("backward" in name)]))
    return None


def _output_elements(func: Any, name: str, args: tuple[Any, ...], given: Sequence[torch.Tensor]) -> int:
    """Elements of a result that may be larger than all arguments, before it is computed."""
    if name in ("mm", "bmm"):
        return int(math.prod(args[0].shape[:-1]) * args[1].shape[-1])
    if torch.Tag.pointwise in func.tags:
        return math.prod(torch.broadcast_shapes(*(t.shape for t in given)))
    return 0


def _of_lists(args: tuple[Any, ...], kwargs: Mapping[str, Any], largest: int) -> Part | None:
    """Some of the tensors of an operator that does the same to each tensor of a list."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg]
    count = len(lists[0])
    chosen, elements = [], 0
    for i in range(count):
        beside = [tensors[i] for tensors in lists if len(tensors) == count]
        size = sum(t.numel() for t in beside if isinstance(t, torch.Tensor))
        if elements + size <= largest:
            chosen.append(i)
            elements += size
    if not chosen:
        return None

    def some(value: Any) -> Any:
        whole = isinstance(value, (list, tuple)) and len(value) == count
        return [value[i] for i in chosen] if whole else value

    return Part(tuple(map(some, args)), {k: some(v) for k, v in kwargs.items()}, some)


def _of_product(args: tuple[Any, ...], kwargs: Mapping[str, Any], largest: int) -> Part:
    """The first rows times the first columns, of the first matrices."""
    left, right = args
    terms = left.shape[-1]
    side = max(1, min(math.isqrt(largest // 4), largest // (4 * max(1, terms))))
    rows, columns = min(side, left.shape[-2]), min(side, right.shape[-1])
    matrices = max(1, largest // (2 * (rows * terms + terms * columns + rows * columns)))

    def corner(output: torch.Tensor) -> torch.Tensor:
        return output[..., :rows, :columns][:matrices] if output.ndim == 3 else output[:rows, :columns]

    few = slice(None, matrices) if left.ndim == 3 else Ellipsis
    return Part((left[few][..., :rows, :], right[few][..., :columns]), kwargs, corner)


def _of_rows(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    given: Sequence[torch.Tensor],
    largest: int,
    whole: int | None,
) -> Part | None:
    """The beginning along the longest dimension, except the one that the operator needs whole."""
    shape = torch.broadcast_shapes(*(t.shape for t in given))
    free = [d for d in range(len(shape)) if whole is None or d != whole % len(shape)]
    if not free:
        return None
    from_right = max(free, key=lambda d: shape[d]) - len(shape)
    length = shape[from_right]
    keep = largest * length // (math.prod(shape) * (len(given) + 1))
    if keep < 1:
        return None

    def beginning(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim < -from_right:
            return value
        return value.narrow(from_right, 0, keep) if value.shape[from_right] == length else value

    begun, named = tree_map(beginning, (args, dict(kwargs)))
    return Part(begun, named, lambda output: tree_map(beginning, output))
