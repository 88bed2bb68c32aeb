"""A stand-in for torch_npu: device `npu` in host memory, run by CPU kernels, with `hccl` over gloo.

It proves code paths on a machine without Ascend hardware. It never proves Ascend numerics or speed:
every number comes from a CPU kernel.

Variables: `NPU_SIM_DEVICES` (how many devices, 2), `NPU_SIM_MEMORY_MB` (memory of each, 65536),
`NPU_SIM_CACHE` (where the compiled library is kept). `ASCEND_RT_VISIBLE_DEVICES` masks devices as usual.
"""

import os
import sys


def _import_torch_without_autoload() -> None:
    # torch's autoload would import this package again while it is still being imported.
    before = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        import torch  # noqa: F401
    finally:
        del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
        if before is not None:
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = before


if "torch" not in sys.modules:
    _import_torch_without_autoload()

import torch  # noqa: E402

from torch_npu.build import library  # noqa: E402

_C = library()
torch.utils.rename_privateuse1_backend("npu")

from torch_npu import distributed, npu, operators  # noqa: E402

__version__ = "2.13.0+sim"

npu.register()
distributed.register()
operators.register()

npu_fusion_attention = torch.ops.npu.npu_fusion_attention
npu_rms_norm = torch.ops.npu.npu_rms_norm
npu_rotary_mul = torch.ops.npu.npu_rotary_mul
npu_swiglu = torch.ops.npu.npu_swiglu


def _autoload() -> None:
    """The entry point of `torch.backends`: importing the package has done the work."""


__all__ = ["npu", "npu_fusion_attention", "npu_rms_norm", "npu_rotary_mul", "npu_swiglu"]
