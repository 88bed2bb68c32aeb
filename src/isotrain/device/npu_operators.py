"""Ascend's fused operators. Compared with eager models on a simulated device; not verified on hardware yet.

T: packed tokens, S: padded samples, L: their length, H: query heads, D: head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from isotrain.device.fused import FusedOperators

# torch_npu is imported where it is called: this module is read on machines that do not have it.

# The operator builds the causal mask itself, aligned at the last tokens; it wants this triangle as a pattern.
BOTTOM_RIGHT_CAUSAL = 3
COMPRESSED_MASK = 2048


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    import torch_npu

    dtype = torch.promote_types(x.dtype, weight.dtype)
    result: torch.Tensor = torch_npu.npu_rms_norm(x.to(dtype), weight.to(dtype), epsilon)[0]
    return result


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    import torch_npu

    result: torch.Tensor = torch_npu.npu_swiglu(gate_up, dim=-1)
    return result


def rotary(x_SLHD: torch.Tensor, cos_SL1D: torch.Tensor, sin_SL1D: torch.Tensor) -> torch.Tensor:
    import torch_npu

    result: torch.Tensor = torch_npu.npu_rotary_mul(x_SLHD, cos_SL1D, sin_SL1D)
    return result


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    query_ends: Sequence[int] = (),
    key_ends: Sequence[int] = (),
) -> torch.Tensor:
    import torch_npu

    # The ends are host numbers: reading them from a tensor, as transformers does, would wait for the device.
    ends = {"actual_seq_qlen": tuple(query_ends), "actual_seq_kvlen": tuple(key_ends)} if query_ends else {}
    result: torch.Tensor = torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[-2],
        "TND" if query_ends else "BSND",
        atten_mask=_causal_mask(query.device),
        scale=scale,
        keep_prob=1.0 - dropout,
        sparse_mode=BOTTOM_RIGHT_CAUSAL,
        **ends,
    )[0]
    return result


@cache
def _causal_mask(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # kept for all calls, those that need a gradient among them
        return torch.ones(COMPRESSED_MASK, COMPRESSED_MASK, dtype=torch.bool, device=device).triu_(1)


OPERATORS = FusedOperators(rms_norm, swiglu, rotary, attention)
