"""Ascend NPUs and their fused operators, through torch_npu. Not verified on hardware yet.

Run on a simulated device only, where the operators were compared with eager models.

T: packed tokens, S: padded samples, L: their length, H: query heads, D: head size, R: rows, E: experts,
M, N: sizes before and after an expert's matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from isotrain.device.accelerator import Accelerator
from isotrain.device.base import FusedOperators, Profiler

# torch_npu is imported where it is called: this module is read on machines that do not have it.

# The operator builds the causal mask itself, aligned at the last tokens; it wants this triangle as a pattern.
BOTTOM_RIGHT_CAUSAL = 3
COMPRESSED_MASK = 2048

# Of a product of (m, k) and (k, n), groups divide m, or k: then each has a product of its own.
GROUPED_ROWS, GROUPED_SUMS = 0, 2
ONE_RESULT = 3
COUNTS = 1


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


def grouped_matmul(rows_RM: torch.Tensor, weights_EMN: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    if len(weights_EMN) == 1:
        return rows_RM @ weights_EMN[0]  # the operator wants more than one group
    result: torch.Tensor = _GroupedMatmul.apply(rows_RM.contiguous(), weights_EMN, counts_E)  # type: ignore[no-untyped-call]
    return result


class _GroupedMatmul(torch.autograd.Function):
    """The operator has no derivative of its own: both gradients are grouped products again."""

    @staticmethod
    def forward(
        ctx: Any, rows_RM: torch.Tensor, weights_EMN: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_RM, weights_EMN, counts_E)
        return _grouped(rows_RM, weights_EMN, counts_E, GROUPED_ROWS)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_RM, weights_EMN, counts_E = ctx.saved_tensors
        gradient_RN = gradients[0].contiguous()
        of_rows = of_weights = None
        if ctx.needs_input_grad[0]:
            of_rows = _grouped(gradient_RN, weights_EMN.transpose(1, 2), counts_E, GROUPED_ROWS)
        if ctx.needs_input_grad[1]:
            of_weights = _grouped(rows_RM.T, gradient_RN, counts_E, GROUPED_SUMS)
            # Nothing says that the operator writes zeros for an expert that no token chose.
            of_weights = of_weights.masked_fill_((counts_E == 0)[:, None, None], 0)
        return of_rows, of_weights, None


def _grouped(x: torch.Tensor, weights: torch.Tensor, counts_E: torch.Tensor, groups: int) -> torch.Tensor:
    import torch_npu

    result: torch.Tensor = torch_npu.npu_grouped_matmul(
        [x],
        [weights],
        group_list=counts_E,
        split_item=ONE_RESULT,
        group_type=groups,
        group_list_type=COUNTS,
    )[0]
    return result


OPERATORS = FusedOperators(rms_norm, swiglu, rotary, attention, grouped_matmul)


def _prepare() -> None:
    # Operators are compiled ahead of time: with varying packed shapes, compiling each one would dominate.
    torch.npu.set_compile_mode(jit_compile=False)  # type: ignore[attr-defined]


def _deterministic_variables(environment: Mapping[str, str]) -> dict[str, str]:
    collectives = {"HCCL_DETERMINISTIC": "true"}
    if environment.get("HCCL_OP_EXPANSION_MODE") == "AIV":
        collectives = {"LCCL_DETERMINISTIC": "1", "ATB_LLM_LCOC_ENABLE": "0"}
    # The last one is the default: overflows must be seen, not cut to the largest number.
    products = {"CLOSE_MATMUL_K_SHIFT": "1", "ATB_MATMUL_SHUFFLE_K_ENABLE": "0", "INF_NAN_MODE_ENABLE": "1"}
    return collectives | products


def _port_variables(environment: Mapping[str, str]) -> dict[str, str]:
    # Each process on a device listens, and by default all at the same ports: a rank and a colocated engine
    # cannot both. A first port that the user has set would be overruled by a range.
    names = ["HCCL_NPU_SOCKET_PORT_RANGE"]
    if not environment.get("HCCL_IF_BASE_PORT"):
        names.append("HCCL_HOST_SOCKET_PORT_RANGE")
    return {name: environment.get(name) or "auto" for name in names}


def _profiler() -> Profiler:
    from torch_npu.profiler import profile

    profiler: Profiler = profile()  # of host and device, where nothing else is said
    return profiler


NPU = Accelerator(
    type="npu",
    collectives="cpu:gloo,npu:hccl",
    rebuild_shared="torch_npu.multiprocessing.reductions:rebuild_npu_tensor",
    profiler=_profiler,
    interface_variable="HCCL_SOCKET_IFNAME",
    connect_timeout_variable="HCCL_CONNECT_TIMEOUT",
    visible_devices_variable="ASCEND_RT_VISIBLE_DEVICES",
    ray_resource="NPU",
    numerics_variables=(
        "ASCEND_RT_VISIBLE_DEVICES",
        "HCCL_DETERMINISTIC",
        "HCCL_OP_EXPANSION_MODE",
        "LCCL_DETERMINISTIC",
        "CLOSE_MATMUL_K_SHIFT",
        "ATB_MATMUL_SHUFFLE_K_ENABLE",
        "ATB_LLM_LCOC_ENABLE",
        "INF_NAN_MODE_ENABLE",
        "TORCH_NPU_FALLBACK_CPU_DISABLE",
        "PYTORCH_NPU_ALLOC_CONF",
    ),
    # transformers carries its own variable-length attention for this device: no flash_attn package.
    flash_packages=("torch_npu",),
    # No official data sheet confirms these (lower published bound per chip): `device.peak_tflops` overrides.
    peak_bf16_tflops={
        "Ascend910B1": 379,
        "Ascend910B2": 354,
        "Ascend910B3": 295,
        "Ascend910B4": 270,
        "Ascend910_93": 376,
    },
    # transformers would call a grouped product that torch_npu does not have under torch's name.
    experts="eager",
    # transformers' variable-length attention for this device takes a window and drops it.
    flash_window=False,
    deterministic_variables=_deterministic_variables,
    port_variables=_port_variables,
    prepare=_prepare,
    fused_operators=OPERATORS,
)
