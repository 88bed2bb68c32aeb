"""Attention on paper, which holds in memory what flash kernels hold.

S: batch, H: query heads, G: key/value heads, L: queries, K: keys, D: head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F


class _Flash(torch.autograd.Function):
    """Output and one number per query and head are kept for the backward pass, scores are not."""

    @staticmethod
    def forward(
        ctx: Any, query_SHLD: torch.Tensor, key_SGKD: torch.Tensor, value_SGKD: torch.Tensor
    ) -> torch.Tensor:
        out_SHLD = query_SHLD.new_empty(*query_SHLD.shape[:-1], value_SGKD.shape[-1])
        lse_SHL = query_SHLD.new_empty(query_SHLD.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query_SHLD, key_SGKD, value_SGKD, out_SHLD, lse_SHL)
        return out_SHLD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query_SHLD, key_SGKD, value_SGKD, _, _ = ctx.saved_tensors
        return tuple(torch.empty_like(x) for x in (query_SHLD, key_SGKD, value_SGKD))


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    out: torch.Tensor = _Flash.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out


@contextmanager
def flash_on_paper() -> Iterator[None]:
    """In place of torch's own, which would take a device that it does not know for one without a kernel."""
    kept = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _flash
    try:
        yield
    finally:
        F.scaled_dot_product_attention = kept
