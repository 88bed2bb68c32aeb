"""Causal attention over packed samples, exact and without padding, for devices without a flash kernel.

H: query heads, G: key/value heads, T: packed tokens, D: head size, S: samples of equal length L.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from isotrain.errors import ModelError

SEGMENTS = "isotrain_segments"
# On a CPU, up to this length the float32 kernel is up to three times as fast in the backward pass.
SHORT_ON_CPU = 384


def segment_attention(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segment_lengths: tuple[int, ...],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: SDPA within each sample, so that none sees its neighbour."""
    for unsupported in ("softcap", "s_aux", "position_bias"):
        if extras.get(unsupported) is not None:
            raise ModelError(
                f"this model's attention uses '{unsupported}', which packed attention does not compute here; "
                "set model.attention=padded"
            )
    # Neighbours of equal length share one call: a batch keeps more cores busy than its samples one by one.
    runs = [(length, len(list(same))) for length, same in groupby(segment_lengths)]
    pieces = zip(
        runs,
        query_1HTD.split([length * count for length, count in runs], dim=2),
        key_1GTD.split([length * count for length, count in runs], dim=2),
        value_1GTD.split([length * count for length, count in runs], dim=2),
        strict=True,
    )
    outputs = []
    for (length, count), *tensors in pieces:
        query, key, value = (_as_batch(tensor, length, count) for tensor in tensors)
        output_SHLD = _attend(query, key, value, scaling, dropout, sliding_window)
        outputs.append(output_SHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


def _as_batch(packed_1HTD: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """Samples of one length that lie one after the other, as a batch; a view."""
    batch_SHLD: torch.Tensor = packed_1HTD[0].unflatten(1, (count, length)).transpose(0, 1)
    return batch_SHLD


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> torch.Tensor:
    tokens = query.shape[2]
    mask = None
    if sliding_window is not None and tokens > sliding_window:
        place_T = torch.arange(tokens, device=query.device)
        distance_TT = place_T[:, None] - place_T[None, :]
        mask = (distance_TT >= 0) & (distance_TT < sliding_window)
    dtype = query.dtype
    if query.is_cpu and tokens <= SHORT_ON_CPU:
        query, key, value = query.float(), key.float(), value.float()
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    ).to(dtype)


# Without a mask function of the same name, transformers builds no mask: the segments are the mask.
AttentionInterface.register(SEGMENTS, segment_attention)
