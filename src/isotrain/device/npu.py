"""Ascend NPUs through torch_npu. Run on a simulated device only; not verified on hardware yet."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from isotrain.device.accelerator import Accelerator
from isotrain.device.npu_operators import OPERATORS


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


NPU = Accelerator(
    type="npu",
    collectives="cpu:gloo,npu:hccl",
    rebuild_shared="torch_npu.multiprocessing.reductions:rebuild_npu_tensor",
    interface_variable="HCCL_SOCKET_IFNAME",
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
