"""Causal attention over packed samples, exact and without padding, for devices without a flash kernel.

H: query heads, G: key/value heads, T: packed tokens, D: head size, S: segments of equal length L that each
see K tokens: their own and, where they continue another segment, that one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.flash_attention import flash_attention_forward

from isotrain.device import varlen
from isotrain.device.base import FusedAttention
from isotrain.errors import ModelError

SEGMENTS = "isotrain_segments"
# On a CPU, up to this length the float32 kernel is up to three times as fast in the backward pass.
SHORT_ON_CPU = 384
# Queries times keys of a mask that is worth its memory.
LARGEST_MASK = 1 << 26
# Scores of all heads that exist at one time where no kernel computes a soft cap: half a gibibyte in float32.
CAPPED_SCORES = 1 << 27
# Arguments that do not change what attention computes. Softmax of causal products, within a window, is all
# that is computed here: an argument that is neither known nor in this list is refused.
WITHOUT_EFFECT = {"position_ids", "cache_position", "use_cache", "output_router_logits"}
PADDED, NOT_FUSED = "set model.attention=padded", "set model.fused=off"
NO_FLASH = "set model.attention=sdpa"

Run = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key, value of segments alike: `query_SHLD`, `key_SGLD`, `value_SGLD`."""


def segment_attention(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segment_lengths: tuple[int, ...] | None = None,
    segment_continues: tuple[int, ...] = (),
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: SDPA within each sample, so that none sees its neighbour.

    A segment that continues another one sees that one's tokens as well.
    """
    refuse_unsupported(module, attention_mask, extras, "packed attention", PADDED)
    if segment_lengths is None:
        raise missing_borders(module, PADDED)
    if softcap is None and varlen.takes(query_1HTD, dropout):
        query_THD, key_KGD, value_KGD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1GTD, value_1GTD))
        key_KGD, value_KGD, key_lengths = _after_trunks(
            key_KGD, value_KGD, segment_lengths, segment_continues
        )
        out_THD = varlen.attend(
            query_THD,
            key_KGD,
            value_KGD,
            query_ends=tuple(accumulate(segment_lengths)),
            key_ends=tuple(accumulate(key_lengths)),
            scale=scaling,
            window=sliding_window,
        )
        return out_THD[None], None
    outputs: list[torch.Tensor] = []
    seen: list[Run] = []
    for run, trunk in _runs(
        query_1HTD, key_1GTD, value_1GTD, segment_lengths, segment_continues or (-1,) * len(segment_lengths)
    ):
        if segment_continues:  # each segment by itself, for those that continue it
            seen += zip(*(part.split(1) for part in run), strict=True)
        if trunk < 0:
            output_SHLD = _attend(*run, scaling, dropout, sliding_window, softcap)
        else:
            output_SHLD = _attend_after(seen[trunk], run, scaling, dropout, sliding_window, softcap)
        outputs.append(output_SHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


def refuse_unsupported(
    module: torch.nn.Module, mask: torch.Tensor | None, extras: Mapping[str, Any], operator: str, remedy: str
) -> None:
    """An error for what a model's attention adds, instead of attention without it."""
    extras = dict(extras)
    if mask is not None:
        raise ModelError(
            f"model type '{_model_type(module)}' has an attention mask of its own, which {operator} does not "
            f"apply; {remedy}"
        )
    causal = extras.pop("is_causal", None)
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ModelError(
            f"attention of model type '{_model_type(module)}' is not causal, and {operator} is; {remedy}"
        )
    for name, value in extras.items():
        if value is not None and value is not False and name not in WITHOUT_EFFECT:
            raise ModelError(
                f"attention of model type '{_model_type(module)}' uses '{name}', which {operator} does not "
                f"compute; {remedy}"
            )


def missing_borders(module: torch.nn.Module, remedy: str) -> ModelError:
    """The error for attention that was not told where samples begin: they would see each other."""
    return ModelError(
        f"model type '{_model_type(module)}' does not tell its attention where packed samples begin; {remedy}"
    )


def _model_type(module: torch.nn.Module) -> str:
    return str(getattr(getattr(module, "config", None), "model_type", type(module).__name__))


def _runs(
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    lengths: tuple[int, ...],
    continues: tuple[int, ...],
) -> Iterator[tuple[Run, int]]:
    """Neighbours of one length that continue the same segment, as batches, and which segment that is.

    They share one call: a batch keeps more cores busy than its samples one by one.
    """
    alike = groupby(zip(lengths, continues, strict=True))
    runs = [(length, trunk, len(list(same))) for (length, trunk), same in alike]
    # Split and not sliced: the gradient of every slice would be as large as the whole.
    sizes = [length * count for length, _, count in runs]
    parts = (tensor[0].split(sizes, dim=1) for tensor in (query_1HTD, key_1GTD, value_1GTD))
    for (length, trunk, count), *tensors in zip(runs, *parts, strict=True):
        query, key, value = (part.unflatten(1, (count, length)).transpose(0, 1) for part in tensors)
        yield (query, key, value), trunk


def _attend_after(
    trunk: Run,
    run: Run,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of segments that also see a trunk's tokens, in the cheaper of two ways."""
    past, count, tokens = trunk[0].shape[2], len(run[0]), run[0].shape[2]

    def whole(part: int) -> torch.Tensor:
        return torch.cat([trunk[part].expand(count, -1, -1, -1), run[part]], dim=2)

    key, value = whole(1), whole(2)
    if softcap is not None or (tokens <= past and tokens * (past + tokens) <= LARGEST_MASK):
        return _attend(run[0], key, value, scaling, dropout, sliding_window, softcap)
    # The trunk's outputs are computed once more: still less than a mask costs, whose zeros are computed too.
    return _attend(whole(0), key, value, scaling, dropout, sliding_window, softcap)[:, :, past:]


def _attend(
    query_SHLD: torch.Tensor,
    key_SGKD: torch.Tensor,
    value_SGKD: torch.Tensor,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """The queries are those of the last L of K tokens."""
    if softcap is not None:
        return _attend_capped(query_SHLD, key_SGKD, value_SGKD, scaling, dropout, sliding_window, softcap)
    tokens, seen = query_SHLD.shape[2], key_SGKD.shape[2]
    mask_LK = None
    if seen > tokens or (sliding_window is not None and seen > sliding_window):
        mask_LK = torch.ones(tokens, seen, dtype=torch.bool, device=query_SHLD.device).tril_(seen - tokens)
        if sliding_window is not None:
            mask_LK.triu_(seen - tokens - sliding_window + 1)
    dtype, grouped = query_SHLD.dtype, query_SHLD.shape[1] != key_SGKD.shape[1]
    if grouped and varlen.keeps_scores_of_groups(query_SHLD, masked=mask_LK is not None):
        groups = query_SHLD.shape[1] // key_SGKD.shape[1]
        key_SGKD, value_SGKD = (x.repeat_interleave(groups, dim=1) for x in (key_SGKD, value_SGKD))
        grouped = False
    if query_SHLD.is_cpu and seen <= SHORT_ON_CPU:
        query_SHLD, key_SGKD, value_SGKD = query_SHLD.float(), key_SGKD.float(), value_SGKD.float()
    return F.scaled_dot_product_attention(
        query_SHLD,
        key_SGKD,
        value_SGKD,
        attn_mask=mask_LK,
        dropout_p=dropout,
        is_causal=mask_LK is None,
        scale=scaling,
        enable_gqa=grouped,
    ).to(dtype)


def _attend_capped(
    query_SHLD: torch.Tensor,
    key_SGKD: torch.Tensor,
    value_SGKD: torch.Tensor,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float,
) -> torch.Tensor:
    """Scores within (-softcap, softcap), in float32: block by block of queries where they are many."""
    tokens, seen = query_SHLD.shape[2], key_SGKD.shape[2]
    rows = max(1, CAPPED_SCORES // max(1, query_SHLD.shape[0] * query_SHLD.shape[1] * seen))
    scale = query_SHLD.shape[-1] ** -0.5 if scaling is None else scaling
    outputs, stop = [], seen - tokens
    for query_SHLd in query_SHLD.split(rows, dim=2):
        start, stop = stop, stop + query_SHLd.shape[2]
        first = 0 if sliding_window is None else max(0, start - sliding_window + 1)
        mask_LK = torch.ones(stop - start, stop - first, dtype=torch.bool, device=query_SHLD.device)
        mask_LK.tril_(start - first)
        if sliding_window is not None:
            mask_LK.triu_(start - first - sliding_window + 1)
        block = partial(_capped_block, mask_LK=mask_LK, scale=scale, dropout=dropout, softcap=softcap)
        tensors = query_SHLd, key_SGKD[:, :, first:stop], value_SGKD[:, :, first:stop]
        # The scores of one block only are kept for the backward pass.
        outputs.append(
            block(*tensors) if rows >= tokens else checkpoint(block, *tensors, use_reentrant=False)
        )
    return torch.cat(outputs, dim=2).to(query_SHLD.dtype)


def _capped_block(
    query_SHLD: torch.Tensor,
    key_SGKD: torch.Tensor,
    value_SGKD: torch.Tensor,
    *,
    mask_LK: torch.Tensor,
    scale: float,
    dropout: float,
    softcap: float,
) -> torch.Tensor:
    groups = query_SHLD.shape[1] // key_SGKD.shape[1]
    key_SHKD, value_SHKD = (x.float().repeat_interleave(groups, dim=1) for x in (key_SGKD, value_SGKD))
    scores_SHLK = softcap * torch.tanh(query_SHLD.float() @ key_SHKD.transpose(2, 3) * (scale / softcap))
    weights_SHLK = scores_SHLK.masked_fill(~mask_LK, -torch.inf).softmax(-1)
    return F.dropout(weights_SHLK, dropout) @ value_SHKD


# Without a mask function of the same name, transformers builds no mask: the segments are the mask.
AttentionInterface.register(SEGMENTS, segment_attention)


FUSED, FUSED_PADDED = "isotrain_fused", "isotrain_fused_padded"


def provide(attend: FusedAttention) -> None:
    """Make the device's operator known to transformers, for packs and for rows that are padded."""
    # Without a mask function of the same name, transformers builds no mask: see `fused_attention`.
    AttentionInterface.register(FUSED, partial(fused_attention, attend))
    AttentionInterface.register(FUSED_PADDED, partial(fused_attention, attend, padded=True))


def fused_attention(
    attend: FusedAttention,
    module: torch.nn.Module,
    query_SHLD: torch.Tensor,
    key_SGLD: torch.Tensor,
    value_SGLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    padded: bool = False,
    segment_lengths: tuple[int, ...] | None = None,
    segment_continues: tuple[int, ...] = (),
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature; the one sample of `query_SHLD` is a pack of segments.

    If `padded`, on the right: a causal mask keeps real tokens from what comes after them.
    """
    extras["sliding_window"] = sliding_window
    refuse_unsupported(module, attention_mask, extras, "the fused operator", NOT_FUSED)
    scale = query_SHLD.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x.transpose(1, 2) for x in (query_SHLD, key_SGLD, value_SGLD))
    if padded:
        return attend(query, key, value, scale=scale, dropout=dropout), None
    if segment_lengths is None:
        raise missing_borders(module, PADDED)
    query_THD, key_KGD, value_KGD = query[0], key[0], value[0]
    key_KGD, value_KGD, key_lengths = _after_trunks(key_KGD, value_KGD, segment_lengths, segment_continues)
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


FLASH = "flash_attention_2"


def guard_flash(*, windows: bool) -> None:
    """Have transformers' flash attention refuse what its kernels would silently leave out.

    `windows` says whether those of the device have sliding windows.
    """
    AttentionInterface.register(FLASH, partial(flash_attention, windows))


def flash_attention(
    windows: bool,
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' own over a pack, which it is told the borders of."""
    unsupported = {} if windows else {"sliding_window": sliding_window}
    refuse_unsupported(module, attention_mask, {**extras, **unsupported}, "flash attention", NO_FLASH)
    if cu_seq_lens_q is None:
        raise missing_borders(module, PADDED)
    output: tuple[torch.Tensor, None] = flash_attention_forward(
        module,
        query_1HTD,
        key_1GTD,
        value_1GTD,
        None,
        cu_seq_lens_q=cu_seq_lens_q,
        cu_seq_lens_k=cu_seq_lens_k,
        max_length_q=max_length_q,
        max_length_k=max_length_k,
        scaling=scaling,
        dropout=dropout,
        sliding_window=sliding_window,
        is_causal=True,
    )
    return output


def _after_trunks(
    key_KGD: torch.Tensor, value_KGD: torch.Tensor, lengths: tuple[int, ...], continues: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Keys and values of each segment, with those of the one it continues before them, and their numbers.

    Kernels for packed samples align their causal mask at the last tokens.
    """
    if not continues:
        return key_KGD, value_KGD, lengths
    trunks = [lengths[trunk] if trunk >= 0 else 0 for trunk in continues]
    key_KGD, value_KGD = (_with_trunks(x.split(lengths), continues) for x in (key_KGD, value_KGD))
    return key_KGD, value_KGD, tuple(map(sum, zip(trunks, lengths, strict=True)))


def _with_trunks(parts: tuple[torch.Tensor, ...], continues: tuple[int, ...]) -> torch.Tensor:
    """Each segment's own, after those of the one that it continues."""
    together = (
        [parts[trunk], segment] if trunk >= 0 else [segment]
        for segment, trunk in zip(parts, continues, strict=True)
    )
    return torch.cat([part for pair in together for part in pair])


def is_padded(attention: str) -> bool:
    """Whether samples lie in rows of one length instead of side by side."""
    return attention in ("padded", "fused-padded")


def shares_prompts(attention: str) -> bool:
    """Whether this attention can compute a prompt once for several responses."""
    return attention in ("sdpa", "fused")
