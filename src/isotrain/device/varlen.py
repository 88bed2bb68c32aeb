"""torch's own kernel for attention over packed samples, where it can take the tensors.

For CUDA devices without the flash_attn package. Compared with a reference on the host; not run on CUDA yet.

T: packed query tokens, K: packed key tokens, H: query heads, G: key/value heads, D: head size.
"""

from __future__ import annotations

import inspect
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch

LARGEST_HEAD = 256
# The first generation whose matrix units the kernel is written for.
FIRST_CAPABILITY = (8, 0)
NEEDED = ("scale", "window_size", "enable_gqa")


@cache
def _kernel() -> Any:
    """None in versions of torch that lack it; torch 2.10's can neither scale nor group heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if set(NEEDED) <= set(inspect.signature(varlen_attn).parameters) else None


@cache
def _is_new_enough(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def takes(query: torch.Tensor, dropout: float) -> bool:
    """Whether the kernel can be used for such queries (heads of D numbers in the last dimension)."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= LARGEST_HEAD
        and query.shape[-1] % 8 == 0
        and dropout == 0.0
        and _kernel() is not None
        and _is_new_enough(query.device)
    )


def keeps_scores_of_groups(query: torch.Tensor, masked: bool) -> bool:
    """Whether SDPA with grouped heads falls to the kernel that keeps all scores.

    Kernels of devices that take a mask take no groups, nor do CUDA's for float32.
    """
    return not query.is_cpu and (masked or (query.is_cuda and query.dtype == torch.float32))


def attend(
    query_THD: torch.Tensor,
    key_KGD: torch.Tensor,
    value_KGD: torch.Tensor,
    *,
    query_ends: tuple[int, ...],
    key_ends: tuple[int, ...],
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Causal attention within segments, whose last query sees all keys, or the last `window` of them."""
    result: torch.Tensor = _kernel()(
        query_THD,
        key_KGD,
        value_KGD,
        _starts(query_ends, query_THD.device),
        _starts(key_ends, query_THD.device),
        _longest(query_ends),
        _longest(key_ends),
        scale=scale,
        # Tokens to the left and to the right of the one that looks.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_THD.shape[1] != key_KGD.shape[1],
    )
    return result


@lru_cache(maxsize=8)  # the same for all layers: one copy to the device instead of one for each
def _starts(ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor((0, *ends), dtype=torch.int32, device=device)


def _longest(ends: tuple[int, ...]) -> int:
    return max(end - start for start, end in pairwise((0, *ends)))
