"""Recurrent token mixers over packed samples: each sample by itself, in rows that are padded.

transformers' code for these layers is told where samples begin, and ignores it where a kernel is missing,
without a word: here it is given whole samples only.

L: tokens of a row, D: hidden size, R: rows of one call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from isotrain.models.attention import PADDED, missing_borders

KIND = "linear_attention"
"""What configurations call such layers."""

# Gated delta rules after a short convolution. Both are causal: what is padded on the right changes nothing.
_MIXERS = {
    *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
    *("KimiLinearDeltaAttention", "OlmoHybridGatedDeltaNet"),
}


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """The mixers that can be computed sample by sample."""
    return [module for module in model.modules() if type(module).__name__ in _MIXERS]


def unpack_mixers(model: nn.Module) -> None:
    """Have each mixer of a model over packs take its samples apart."""
    for mixer in mixers_of(model):
        if "forward" not in vars(mixer):
            mixer.forward = partial(_by_sample, mixer, mixer.forward)


def _by_sample(
    mixer: nn.Module,
    forward: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    cache_params: Any = None,
    attention_mask: torch.Tensor | None = None,
    *,
    segment_lengths: tuple[int, ...] | None = None,
    segment_continues: tuple[int, ...] = (),
    **extras: Any,
) -> torch.Tensor:
    """The mixer's signature. A segment that continues another is computed again from that one's beginning."""
    if cache_params is not None:  # rows of a decoding loop
        return forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **extras)
    if segment_lengths is None:
        raise missing_borders(mixer, PADDED)
    segments = hidden_states[0].split(segment_lengths)
    rows = [
        torch.cat([segments[trunk], segment]) if trunk >= 0 else segment
        for segment, trunk in zip(segments, segment_continues or (-1,) * len(segments), strict=True)
    ]
    outputs = list(segments)
    # Rows of a call differ in length by less than a factor of two: so much padding is computed at most.
    order = sorted((n for n, segment in enumerate(segments) if len(segment)), key=lambda n: len(rows[n]))
    for _size, alike in groupby(order, key=lambda n: len(rows[n]).bit_length()):
        numbers = list(alike)
        rows_RLD = pad_sequence([rows[n] for n in numbers], batch_first=True)
        for n, output_LD in zip(numbers, forward(rows_RLD).unbind(), strict=True):
            outputs[n] = output_LD[len(rows[n]) - len(segments[n]) : len(rows[n])]
    return torch.cat(outputs)[None]
