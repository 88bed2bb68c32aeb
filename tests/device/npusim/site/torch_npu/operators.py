"""Reference versions, in plain differentiable torch, of the fused operators that training code calls.

The signatures are those of torch_npu 2.5.1 and 2.6.0, which later versions only extend.
Legend: B batch, S and T tokens, N heads, D head size, H = N * D.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

WIDE = 2147483647
# The sparse modes that take the compressed mask and build the causal one themselves.
TOP_LEFT_CAUSAL, BOTTOM_RIGHT_CAUSAL = 2, 3
COMPRESSED_MASK = (2048, 2048)


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = WIDE,
    next_tockens: int = WIDE,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Attention; returns output, softmax maximum and sum (fp32), an unused tensor, seed, offset, numels."""
    _require_supported(pse, padding_mask, prefix, (pre_tockens, next_tockens), sparse_mode, atten_mask)
    dropout = 1.0 - keep_prob
    if input_layout != "TND":
        q, k, v = (_to_heads(x, input_layout, head_num, query) for x in (query, key, value))
        out, peak, total = _attend(q, k, v, atten_mask, scale, dropout, sparse_mode)
        out = _from_heads(out, input_layout)
        return out, _eightfold(peak), _eightfold(total), query.new_empty(0), 0, 0, 0
    if actual_seq_qlen is None or actual_seq_kvlen is None:
        raise RuntimeError("layout TND needs actual_seq_qlen and actual_seq_kvlen")
    parts, start_q, start_k = [], 0, 0
    for end_q, end_k in zip(actual_seq_qlen, actual_seq_kvlen, strict=True):
        q = query[start_q:end_q].transpose(0, 1)[None]
        k, v = (x[start_k:end_k].transpose(0, 1)[None] for x in (key, value))
        results = _attend(q, k, v, atten_mask, scale, dropout, sparse_mode)
        parts.append([x[0].transpose(0, 1) for x in results])
        start_q, start_k = end_q, end_k
    if (start_q, start_k) != (query.shape[0], key.shape[0]):
        raise RuntimeError(f"the lengths end at {start_q} and {start_k}, not at the last tokens")
    out, peak, total = (torch.cat(x) for x in zip(*parts, strict=True))
    return out, _eightfold(peak), _eightfold(total), query.new_empty(0), 0, 0, 0


def _require_supported(
    pse: Tensor | None,
    padding_mask: Tensor | None,
    prefix: Sequence[int] | None,
    window: tuple[int, int],
    sparse_mode: int,
    mask: Tensor | None,
) -> None:
    if any(x is not None for x in (pse, padding_mask, prefix)) or window != (WIDE, WIDE):
        raise NotImplementedError("the simulation has no pse, padding_mask, prefix or token window")
    if sparse_mode not in (0, TOP_LEFT_CAUSAL, BOTTOM_RIGHT_CAUSAL):
        raise NotImplementedError(f"the simulation has no sparse_mode {sparse_mode}")
    if mask is not None and mask.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(f"atten_mask must be bool or uint8, got {mask.dtype}")
    if sparse_mode and (mask is None or mask.shape != COMPRESSED_MASK):
        raise RuntimeError(f"sparse_mode {sparse_mode} needs an atten_mask of shape {COMPRESSED_MASK}")


def _to_heads(x: Tensor, layout: str, head_num: int, query: Tensor) -> Tensor:
    """Any layout with a batch dimension -> BNSD; keys may have fewer heads than queries."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout not in ("BSH", "SBH"):
        raise RuntimeError(f"input_layout must be BSH, SBH, BSND, BNSD or TND, got {layout}")
    x_BSH = x if layout == "BSH" else x.transpose(0, 1)
    return x_BSH.unflatten(-1, (-1, query.shape[-1] // head_num)).transpose(1, 2)


def _from_heads(x_BNSD: Tensor, layout: str) -> Tensor:
    if layout == "BNSD":
        return x_BNSD
    x_BSND = x_BNSD.transpose(1, 2)
    if layout == "BSND":
        return x_BSND.contiguous()
    x_BSH = x_BSND.flatten(2)
    return x_BSH if layout == "BSH" else x_BSH.transpose(0, 1).contiguous()


def _attend(
    q_BNSD: Tensor,
    k_BNSD: Tensor,
    v_BNSD: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    sparse_mode: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output in the query's dtype, and the maximum and sum of the softmax of every row in float32."""
    groups = q_BNSD.shape[1] // k_BNSD.shape[1]
    with torch.autocast(q_BNSD.device.type, enabled=False):
        q, k, v = q_BNSD.float(), k_BNSD.float(), v_BNSD.float()
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(-1, -2) * scale
        if sparse_mode:
            mask = _causal(scores, shift=scores.shape[-1] - scores.shape[-2] if sparse_mode == 3 else 0)
        if mask is not None:
            scores = scores.masked_fill(mask.bool(), torch.finfo(torch.float32).min)
        peak = scores.detach().amax(-1, keepdim=True)
        weights = (scores - peak).exp()
        total = weights.sum(-1, keepdim=True)
        out = torch.nn.functional.dropout(weights / total, dropout) @ v
    return out.to(q_BNSD.dtype), peak, total.detach()


def _causal(scores: Tensor, shift: int) -> Tensor:
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1 + shift)


def _eightfold(x: Tensor) -> Tensor:
    """The real operator stores each row's statistic eight times."""
    return x.expand(*x.shape[:-1], 8).contiguous()


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """RMSNorm over the dimensions of gamma; returns the result and the reciprocal deviation in float32."""
    dims = tuple(range(-gamma.dim(), 0))
    wide = input.float()
    rstd = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype), rstd.detach()


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """Rotary position embedding with cosines r1 and sines r2, of two halves or of interleaved pairs."""
    if rotary_mode == "half":
        first, second = input.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
    elif rotary_mode == "interleave":
        pairs = input.unflatten(-1, (-1, 2))
        rotated = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    else:
        raise RuntimeError(f"rotary_mode must be half or interleave, got {rotary_mode}")
    return input * r1 + rotated * r2


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """SiLU of the first half times the second half."""
    gate, up = input.chunk(2, dim=dim)
    return torch.nn.functional.silu(gate) * up
