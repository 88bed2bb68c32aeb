"""Reference versions, in plain differentiable torch, of the fused operators that training code calls.

They are registered with torch under the schemas of torch_npu 2.5.1 and 2.6.0, which later versions only
extend (of the grouped product, of 2.10.0: before, it had no gradient of weights), compute in float32, as we
take the kernels to do, and refuse what their documentation does not allow.
Legend: B batch, S and T tokens, N heads, D head size, H = N * D.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

WIDE = 2147483647
# The sparse modes that take the compressed mask and build the causal one themselves.
TOP_LEFT_CAUSAL, BOTTOM_RIGHT_CAUSAL = 2, 3
COMPRESSED_MASK = (2048, 2048)
LARGEST_HEADS, LARGEST_ROTARY = 1000, 896

SCHEMAS = {
    "npu_fusion_attention": (
        "(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
        "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
        "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
        "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, "
        "bool gen_mask_parallel=True, bool sync=False) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
    "npu_grouped_matmul": (
        "(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, "
        "Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
        "Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
        "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, "
        "int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, int? output_dtype=None, "
        "int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
        "int? per_token_scale_dtype=None) -> Tensor[]"
    ),
    "npu_rms_norm": "(Tensor input, Tensor gamma, float epsilon=1e-6) -> (Tensor, Tensor)",
    "npu_rotary_mul": "(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half') -> Tensor",
    "npu_swiglu": "(Tensor input, int dim=-1) -> Tensor",
}


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
    if input.dtype != gamma.dtype:
        raise RuntimeError(f"input is {input.dtype}, gamma {gamma.dtype}: not every version takes both")
    dims = tuple(range(-gamma.dim(), 0))
    wide = input.float()
    rstd = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype), rstd.detach()


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """Rotary position embedding with cosines r1 and sines r2, of two halves or of interleaved pairs."""
    _require_rotary(input, r1, r2)
    wide = input.float()
    if rotary_mode == "half":
        first, second = wide.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
    elif rotary_mode == "interleave":
        pairs = wide.unflatten(-1, (-1, 2))
        rotated = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    else:
        raise RuntimeError(f"rotary_mode must be half or interleave, got {rotary_mode}")
    return (wide * r1.float() + rotated * r2.float()).to(input.dtype)


def _require_rotary(input: Tensor, r1: Tensor, r2: Tensor) -> None:
    if not (input.dim() == r1.dim() == r2.dim() == 4 and r1.shape == r2.shape):
        raise RuntimeError("npu_rotary_mul takes tensors of four dimensions, r1 and r2 of one shape")
    if input.shape[-1] != r1.shape[-1] or input.shape[-1] % 2 or input.shape[-1] >= LARGEST_ROTARY:
        raise RuntimeError(f"npu_rotary_mul: a head of {input.shape[-1]} with angles of {r1.shape[-1]}")
    if (
        any(r not in (1, x) for r, x in zip(r1.shape, input.shape, strict=True))
        or max(input.shape[0], min(input.shape[1:3])) >= LARGEST_HEADS
    ):
        raise RuntimeError(f"npu_rotary_mul: {tuple(input.shape)} with angles {tuple(r1.shape)}")
    if any(r.detach().abs().max() > 1 for r in (r1, r2)):
        raise RuntimeError("npu_rotary_mul: r1 and r2 must lie between -1 and 1")


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """SiLU of the first half times the second half."""
    if input.shape[dim] % 2:
        raise RuntimeError(f"npu_swiglu: dimension {dim} of {tuple(input.shape)} has no two halves")
    gate, up = input.float().chunk(2, dim=dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **others: object,
) -> list[Tensor]:
    """One result of one x and one weight, in groups of rows (0) or of what is summed over (2).

    The real operator has no derivative, and may leave anything where a group of sums is empty.
    """
    (one,), (other,) = x, weight
    if any(others.values()) or split_item not in (2, 3) or group_type not in (0, 2):
        raise NotImplementedError("the simulation has one result in groups of rows or of sums, unquantized")
    if torch.is_grad_enabled() and (one.requires_grad or other.requires_grad):
        raise RuntimeError("derivative for npu_grouped_matmul is not implemented")
    sizes = _group_sizes(group_list, group_list_type, one.shape[0 if group_type == 0 else 1])
    if one.dtype != other.dtype:
        raise RuntimeError(f"npu_grouped_matmul: x is {one.dtype}, weight {other.dtype}")
    if group_type == 0:
        if other.dim() != 3 or len(other) != len(sizes):
            raise RuntimeError(f"npu_grouped_matmul: {len(sizes)} groups for weights {tuple(other.shape)}")
        parts = [part.float() @ w.float() for part, w in zip(one.split(sizes), other, strict=True)]
        return [torch.cat(parts).to(one.dtype)]
    if other.dim() != 2 or not one.T.is_contiguous():
        raise RuntimeError(
            "npu_grouped_matmul: groups of sums take a transposed x and weights of two dimensions"
        )
    products = [
        a.float() @ b.float() if size else one.new_full((one.shape[0], other.shape[1]), torch.nan)
        for a, b, size in zip(one.split(sizes, 1), other.split(sizes), sizes, strict=True)
    ]
    return [torch.stack(products).to(one.dtype)]


def _group_sizes(group_list: Tensor | None, group_list_type: int | None, rows: int) -> list[int]:
    if group_list is None or group_list.dtype != torch.int64 or group_list.device.type != "npu":
        raise RuntimeError("npu_grouped_matmul: group_list must be an int64 tensor on the device")
    given = group_list.tolist()
    sizes = given if group_list_type == 1 else [b - a for a, b in zip([0, *given], given, strict=False)]
    if len(sizes) < 2 or min(sizes) < 0 or sum(sizes) != rows:
        raise RuntimeError(f"npu_grouped_matmul: groups of {sizes} do not make {rows}")
    return sizes


# Kept here: operators live as long as the library object that defined them.
LIBRARY = torch.library.Library("npu", "DEF")


def register() -> None:
    """Make the references callable as `torch.ops.npu.*`: torch checks every call against its schema."""
    for name, schema in SCHEMAS.items():
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, globals()[name], "CompositeImplicitAutograd")
