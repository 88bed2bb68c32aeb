"""Parts of an operator's call whose results are exactly those parts of the whole result.

A comparison in float64 on the host needs eight bytes per element: of a large call it takes a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

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
        own = sum(t.numel() for t in beside if isinstance(t, torch.Tensor))
        if elements + own <= largest:
            chosen.append(i)
            elements += own
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
