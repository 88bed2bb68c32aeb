"""The fused operators that training on the device is built on, and the shapes they return."""

from __future__ import annotations

from typing import Any

import torch

# Arguments as in the oldest version looked at; every later one begins with them and adds only defaults.
FUSED: dict[str, tuple[str, ...]] = {
    "npu_fusion_attention": (
        *("query", "key", "value", "head_num", "input_layout", "pse", "padding_mask", "atten_mask", "scale"),
        *("keep_prob", "pre_tockens", "next_tockens", "inner_precise", "prefix"),
        *("actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "gen_mask_parallel", "sync"),
    ),
    "npu_fusion_attention_grad": (
        *("query", "key", "value", "dy", "head_num", "input_layout", "pse", "padding_mask", "atten_mask"),
        *("softmax_max", "softmax_sum", "softmax_in", "attention_in", "scale_value", "keep_prob"),
        *("pre_tockens", "next_tockens", "inner_precise", "seed", "offset", "numels", "prefix"),
        *("actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "gen_mask_parallel", "sync"),
    ),
    "npu_grouped_matmul": (
        *("x", "weight", "bias", "scale", "offset", "antiquant_scale", "antiquant_offset"),
        *("per_token_scale", "group_list", "activation_input", "activation_quant_scale"),
        *("activation_quant_offset", "split_item", "group_type", "group_list_type", "act_type"),
    ),
    "npu_rms_norm": ("input", "gamma", "epsilon"),
    "npu_rms_norm_backward": ("dy", "input", "gamma", "rstd"),
    "npu_rotary_mul": ("input", "r1", "r2", "rotary_mode"),
    "npu_rotary_mul_backward": ("grad", "input", "r1", "r2", "rotary_mode"),
    "npu_swiglu": ("input", "dim"),
    "npu_swiglu_backward": ("grad_output", "input", "dim"),
}
# Only in the newest version looked at: context parallelism on older ones has to merge blocks itself.
NEWEST: dict[str, tuple[str, ...]] = {
    "npu_ring_attention_update": (
        *("prev_attn_out", "prev_softmax_max", "prev_softmax_sum"),
        *("cur_attn_out", "cur_softmax_max", "cur_softmax_sum"),
        *("actual_seq_qlen", "input_layout", "input_softmax_layout"),
    ),
}

Shapes = dict[str, list[list[Any]]]


def shapes(torch_npu: Any, device: str) -> Shapes:
    """Shape and type of all tensors that the operators return for some calls; `meta` computes nothing."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    padded, packed, grouped = empty(2, 16, 4, 64), empty(24, 4, 64), empty(24, 2, 64)
    mask = empty(2048, 2048, dtype=torch.bool)
    groups = torch.tensor([20, 4], device=device)
    lengths = {"actual_seq_qlen": (10, 24), "actual_seq_kvlen": (10, 24)}
    attention, angles = torch_npu.npu_fusion_attention, (empty(1, 16, 1, 64), empty(1, 16, 1, 64))
    results = {
        "attention BSND": attention(padded, padded, padded, 4, "BSND", scale=0.125),
        "attention BSND, causal": attention(
            padded, padded, padded, 4, "BSND", atten_mask=mask, sparse_mode=3
        ),
        "attention BNSD": attention(*[padded.transpose(1, 2)] * 3, 4, "BNSD"),
        "attention TND": attention(packed, packed, packed, 4, "TND", **lengths),
        "attention TND, grouped": attention(packed, grouped, grouped, 4, "TND", **lengths),
        "grouped product": torch_npu.npu_grouped_matmul(
            [empty(24, 64)],
            [empty(2, 64, 32)],
            group_list=groups,
            split_item=3,
            group_type=0,
            group_list_type=1,
        ),
        "grouped product, gradient of rows": torch_npu.npu_grouped_matmul(
            [empty(24, 32)],
            [empty(2, 64, 32).transpose(1, 2)],
            group_list=groups,
            split_item=3,
            group_type=0,
            group_list_type=1,
        ),
        "grouped product, gradient of weights": torch_npu.npu_grouped_matmul(
            [empty(24, 64).T],
            [empty(24, 32)],
            group_list=groups,
            split_item=3,
            group_type=2,
            group_list_type=1,
        ),
        "rms norm": torch_npu.npu_rms_norm(empty(2, 16, 256), empty(256)),
        "rms norm, float32": torch_npu.npu_rms_norm(
            empty(2, 16, 256, dtype=torch.float32), empty(256, dtype=torch.float32), epsilon=1e-5
        ),
        "rotary": torch_npu.npu_rotary_mul(padded, *angles),
        "swiglu": torch_npu.npu_swiglu(empty(2, 16, 256), dim=-1),
    }
    return {name: _shapes(result) for name, result in results.items()}


def _shapes(result: Any) -> list[list[Any]]:
    tensors = (result,) if isinstance(result, torch.Tensor) else result
    return [[list(t.shape), str(t.dtype)] for t in tensors if isinstance(t, torch.Tensor)]
