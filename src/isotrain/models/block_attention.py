"""Attention of some queries to some keys, with what it takes to combine it with attention to others.

H: query heads, G: key/value heads, D: head size, Q: queries, K: keys, C: queries of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from isotrain.models.ring_blocks import Block

# Scores of all heads that are in memory at a time, where no kernel avoids them.
LARGEST_SCORES = 1 << 24

_cpu_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    query_HQD: torch.Tensor,
    key_GKD: torch.Tensor,
    value_GKD: torch.Tensor,
    block: Block,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the logarithm of each query's softmax denominator in float32."""
    key_HKD, value_HKD = (_per_query_head(x, len(query_HQD)) for x in (key_GKD, value_GKD))
    if query_HQD.is_cpu and block.distance is None:
        out, lse = _cpu_kernel(
            query_HQD[None], key_HKD[None], value_HKD[None], 0.0, block.causal, scale=scale
        )
        return out[0], lse[0]
    out_HQD = torch.empty(query_HQD.shape, dtype=torch.float32, device=query_HQD.device)
    lse_HQ = torch.empty(query_HQD.shape[:2], dtype=torch.float32, device=query_HQD.device)
    value_HKD = value_HKD.float()
    for part, scores_HCK in _scores(query_HQD, key_HKD, block, scale, window):
        lse_HQ[:, part] = scores_HCK.logsumexp(-1)
        # A query that sees none of the keys has no softmax, and adds nothing.
        share_HCK = scores_HCK.sub_(lse_HQ[:, part, None]).exp_().nan_to_num_(0.0)
        out_HQD[:, part] = share_HCK @ value_HKD
    return out_HQD, lse_HQ


def attend_backward(
    grad_HQD: torch.Tensor,
    query_HQD: torch.Tensor,
    key_GKD: torch.Tensor,
    value_GKD: torch.Tensor,
    out_HQD: torch.Tensor,
    lse_HQ: torch.Tensor,
    block: Block,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values; output and denominator are those over all keys of all blocks."""
    heads = len(key_GKD)
    key_HKD, value_HKD = (_per_query_head(x, len(query_HQD)) for x in (key_GKD, value_GKD))
    if query_HQD.is_cpu and block.distance is None:
        grads = _cpu_kernel_backward(
            *(x[None] for x in (grad_HQD, query_HQD, key_HKD, value_HKD, out_HQD, lse_HQ)),
            0.0,
            block.causal,
            scale=scale,
        )
        query, key, value = (grad[0] for grad in grads)
        return query, _per_key_head(key, heads), _per_key_head(value, heads)
    grad_query_HQD = torch.empty(query_HQD.shape, dtype=torch.float32, device=query_HQD.device)
    grad_key_HKD, grad_value_HKD = (
        torch.zeros(key_HKD.shape, dtype=torch.float32, device=query_HQD.device) for _ in range(2)
    )
    query, key, value, grad = (x.float() for x in (query_HQD, key_HKD, value_HKD, grad_HQD))
    mean_HQ = (grad * out_HQD).sum(-1)
    for part, scores_HCK in _scores(query_HQD, key_HKD, block, scale, window):
        share_HCK = scores_HCK.sub_(lse_HQ[:, part, None]).exp_()
        grad_value_HKD += share_HCK.mT @ grad[:, part]
        towards_HCK = (grad[:, part] @ value.mT).sub_(mean_HQ[:, part, None]).mul_(share_HCK).mul_(scale)
        grad_query_HQD[:, part] = towards_HCK @ key
        grad_key_HKD += towards_HCK.mT @ query[:, part]
    return grad_query_HQD, _per_key_head(grad_key_HKD, heads), _per_key_head(grad_value_HKD, heads)


def _scores(
    query_HQD: torch.Tensor, key_HKD: torch.Tensor, block: Block, scale: float, window: int | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Scores of some queries at a time, in float32; minus infinity where a key is not seen."""
    heads, queries, keys = len(query_HQD), query_HQD.shape[1], key_HKD.shape[1]
    key_HDK = key_HKD.float().mT
    chunk = max(1, LARGEST_SCORES // (heads * keys))
    at_K = torch.arange(keys, device=query_HQD.device)
    for start in range(0, queries, chunk):
        part = slice(start, min(start + chunk, queries))
        scores_HCK = (query_HQD[:, part].float() * scale) @ key_HDK
        if block.causal or block.distance is not None:
            at_C = torch.arange(part.start, part.stop, device=query_HQD.device)
            at_C1 = at_C[:, None] + (block.distance or 0)
            hidden_CK = at_K > at_C1
            if window is not None:
                hidden_CK |= at_K <= at_C1 - window
            scores_HCK.masked_fill_(hidden_CK, -torch.inf)
        yield part, scores_HCK


def _per_query_head(x_GKD: torch.Tensor, heads: int) -> torch.Tensor:
    return x_GKD.repeat_interleave(heads // len(x_GKD), dim=0) if len(x_GKD) != heads else x_GKD


def _per_key_head(grad_HKD: torch.Tensor, heads: int) -> torch.Tensor:
    """Query heads that share a key/value head add up."""
    if len(grad_HKD) == heads:
        return grad_HKD
    summed_GKD: torch.Tensor = grad_HKD.float().unflatten(0, (heads, -1)).sum(1)
    return summed_GKD
