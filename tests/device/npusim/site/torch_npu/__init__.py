"""A stand-in for torch_npu: device `npu` in host memory, run by CPU kernels, with `hccl` over gloo.

It proves code paths on a machine without Ascend hardware. It never proves Ascend numerics or speed:
every number comes from a CPU kernel. It refuses what a device refuses: memory beyond its capacity, float64
arithmetic, ports of HCCL that another process has.

| variable | meaning | default |
|---|---|---|
| `NPU_SIM_DEVICES` | number of devices | 2 |
| `NPU_SIM_MEMORY_MB` | memory of each in MiB, which may be a fraction | 65536 |
| `NPU_SIM_HOST` | a directory; processes with the same one share devices, memory and HCCL's ports | |
| `NPU_SIM_EXCLUSIVE` | 1: a device belongs to the first process that uses it; needs `NPU_SIM_HOST` | 0 |
| `NPU_SIM_CACHE` | where the compiled library is kept | the user's cache |

`ASCEND_RT_VISIBLE_DEVICES` masks devices as usual. Allocators keep freed memory until `empty_cache`, as real
ones do, but neither fragment it nor round sizes up; a process costs nothing by itself.
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

from torch_npu import distributed, npu, operators, profiler  # noqa: E402, F401
from torch_npu.multiprocessing import reductions  # noqa: E402

__version__ = "2.13.0+sim"

npu.register()
distributed.register()
operators.register()
reductions.register()

npu_fusion_attention = torch.ops.npu.npu_fusion_attention
npu_grouped_matmul = torch.ops.npu.npu_grouped_matmul
npu_rms_norm = torch.ops.npu.npu_rms_norm
npu_rotary_mul = torch.ops.npu.npu_rotary_mul
npu_swiglu = torch.ops.npu.npu_swiglu


def _autoload() -> None:
    """The entry point of `torch.backends`: importing the package has done the work."""


__all__ = [
    "npu",
    "npu_fusion_attention",
    "npu_grouped_matmul",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_swiglu",
]
