"""Causal attention by a device's fused operator, over packed samples or padded ones.

S: padded samples, L: their length, T: packed tokens, K: tokens that are seen, H: query heads,
G: key/value heads, D: head size.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import torch
from transformers import AttentionInterface

from isotrain.device.fused import FusedAttention
from isotrain.errors import ModelError
from isotrain.models.attention import UNSUPPORTED

FUSED = "isotrain_fused"


def provide(attend: FusedAttention) -> None:
    """Make the device's operator known to transformers under the name `FUSED`."""
    # Without a mask function of the same name, transformers builds no mask: see `fused_attention`.
    AttentionInterface.register(FUSED, partial(fused_attention, attend))


def fused_attention(
    attend: FusedAttention,
    module: torch.nn.Module,
    query_SHLD: torch.Tensor,
    key_SGLD: torch.Tensor,
    value_SGLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segment_lengths: tuple[int, ...] = (),
    segment_continues: tuple[int, ...] = (),
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature; with segments, the one sample of `query_SHLD` is a pack of them.

    Without, samples are padded on the right: a causal mask keeps real tokens from what comes after them.
    """
    extras["sliding_window"] = sliding_window
    for unsupported in (*UNSUPPORTED, "sliding_window"):
        if extras.get(unsupported) is not None:
            raise ModelError(
                f"this model's attention uses '{unsupported}', which the fused operator does not compute; "
                "set model.fused=off"
            )
    scale = query_SHLD.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x.transpose(1, 2) for x in (query_SHLD, key_SGLD, value_SGLD))
    if not segment_lengths:
        return attend(query, key, value, scale=scale, dropout=dropout), None
    query_THD, key_KGD, value_KGD = query[0], key[0], value[0]
    key_lengths = segment_lengths
    if segment_continues:
        # The operator aligns its causal mask at the last tokens: a trunk's keys go before a segment's own.
        trunks = [segment_lengths[trunk] if trunk >= 0 else 0 for trunk in segment_continues]
        key_lengths = tuple(map(sum, zip(trunks, segment_lengths, strict=True)))
        key_KGD, value_KGD = (
            _with_trunks(x.split(segment_lengths), segment_continues) for x in (key_KGD, value_KGD)
        )
    out_THD = attend(
        query_THD,
        key_KGD,
        value_KGD,
        scale=scale,
        dropout=dropout,
        query_ends=tuple(accumulate(segment_lengths)),
        key_ends=tuple(accumulate(key_lengths)),
    )
    return out_THD[None], None


def _with_trunks(parts: tuple[torch.Tensor, ...], continues: tuple[int, ...]) -> torch.Tensor:
    """Each segment's own, after those of the one that it continues."""
    together = (
        [parts[trunk], own] if trunk >= 0 else [own] for own, trunk in zip(parts, continues, strict=True)
    )
    return torch.cat([part for pair in together for part in pair])
