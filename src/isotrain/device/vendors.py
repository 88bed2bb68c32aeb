"""Facts about vendors that need no torch: data sheets for plans, packages that torch loads, variables.

Names are what people type. None of it was measured here. Where vendors publish no figure, the value is the
lower of those that users report, and `confirmed` is False.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from isotrain.errors import DeviceError, PlanError


@dataclass(frozen=True)
class DataSheet:
    title: str
    memory_gb: float
    """Memory of one device, in 2**30 bytes."""
    tflops: float
    """Dense bfloat16 peak."""
    memory_tb_s: float
    """Bandwidth of its memory."""
    inside_gb_s: float
    """From one device to the others of its machine, each direction."""
    between_gb_s: float
    """From one device to other machines, each direction."""
    per_machine: int
    communicator_gb: tuple[float, float] = (0.4, 0.4)
    """Buffers of a group of ranks that communicate, and of one whose ranks send to single others. A guess
    where no document has it."""
    confirmed: bool = True


# Twice HCCL_BUFFSIZE, which is 200 MB unless it is set, and twice P2P_HCCL_BUFFSIZE, which is 20 MB.
HCCL_GB = (2 * 200 / 1024, 2 * 20 / 1024)

DEVICES = {
    "a2": DataSheet("Ascend 910B, Atlas A2", 64, 295, 1.6, 196, 25, 8, HCCL_GB, confirmed=False),
    "a3": DataSheet("Ascend 910C die, Atlas A3", 64, 376, 1.6, 196, 50, 16, HCCL_GB, confirmed=False),
    "a100": DataSheet("NVIDIA A100 80GB SXM", 80, 312, 2.04, 300, 25, 8),
    "h20": DataSheet("NVIDIA H20", 96, 148, 4.0, 450, 50, 8),
    "h100": DataSheet("NVIDIA H100 SXM", 80, 989, 3.35, 450, 50, 8),
    "h200": DataSheet("NVIDIA H200 SXM", 141, 989, 4.8, 450, 50, 8),
    # Without NVLink; ten gigabits a second to other machines is a guess.
    "rtx3090": DataSheet("NVIDIA GeForce RTX 3090", 24, 71, 0.94, 32, 1.25, 8, confirmed=False),
    "rtx4090": DataSheet("NVIDIA GeForce RTX 4090", 24, 165, 1.01, 32, 1.25, 8, confirmed=False),
    "rtx5090": DataSheet("NVIDIA GeForce RTX 5090", 32, 209, 1.79, 64, 1.25, 8, confirmed=False),
    # A guess at one of two sockets; one rank has it all.
    "cpu": DataSheet("32 cores of a CPU server", 128, 4, 0.2, 20, 3, 1, (0.0, 0.0), confirmed=False),
}


def device_named(name: str) -> DataSheet:
    if name not in DEVICES:
        raise PlanError(f"--device: '{name}' is not known; known are {', '.join(DEVICES)}")
    return DEVICES[name]


KINDS = ("auto", "cuda", "npu", "cpu")


def check_kind(name: str) -> None:
    """Refuse a `device.type` that is none, wherever the device is."""
    if name not in KINDS:
        near = ["cuda"] if name == "gpu" else get_close_matches(name, KINDS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "use one of: " + ", ".join(KINDS)
        raise DeviceError(f"device.type: unknown device '{name}'; {hint}")


_RANKS_OF_A_CORE = 8


def check_host_ranks(ranks: int) -> None:
    """On a host: with more, a mistake in a recipe fills the memory with processes before anything is said."""
    cores = len(os.sched_getaffinity(0))
    if ranks > _RANKS_OF_A_CORE * cores:
        raise DeviceError(
            f"device.ranks: {ranks} ranks would share {cores} cores and need the memory of {ranks} "
            f"processes; set at most {_RANKS_OF_A_CORE * cores}"
        )


def has_device_files() -> bool:
    """Whether a driver has made a device of this machine; the simulated one has none."""
    return any(any(Path("/dev").glob(name)) for name in ("davinci*", "nvidia*", "nvhost*", "dxg"))


# Importing one of them makes torch know a device.
PACKAGES = ("torch_npu",)


def hide_packages() -> None:
    """Keep libraries, which import one if they find it, from it: torch has room for one such device."""
    for name in PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]


# Variables that a child process may see, so that keys of trackers and hubs stay here.
_NAME = re.compile(
    r"""PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|TZ|TMPDIR|TMP|TEMP|VIRTUAL_ENV|CONDA_PREFIX
    |LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|CPATH|CC|CXX|MAX_JOBS
    |SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|(HTTP|HTTPS|ALL|NO)_PROXY""",
    re.VERBOSE,
)
_FAMILY = re.compile(
    r"""LC_|XDG_|PYTHON|ISOTRAIN_|HF_|TRANSFORMERS_|TOKENIZERS_|TORCH|PYTORCH_|TRITON_|VLLM_|SGLANG_|FLASHINFER_
    |OMP_|GOMP_|KMP_|MKL_|ATEN_|DNNL_|ONEDNN_|OPENBLAS_|GLOO_""",
    re.VERBOSE,
)
_VENDOR = re.compile(
    r"""CUDA_|CUBLAS|CUDNN_|NVIDIA_|NCCL_
    |ASCEND|ATB_|HCCL_|LCCL_|NPU_|TASK_QUEUE_|CPU_AFFINITY_|INF_NAN_|CLOSE_MATMUL_""",
    re.VERBOSE,
)
_SECRET = re.compile(r"(?:^|_)(?:AUTH|CREDENTIALS?|KEY|PASSWD|PASSWORD|SECRET|TOKEN)(?:_|$)")


def child_environment(environment: Mapping[str, str], passed: Collection[str] = ()) -> dict[str, str]:
    """Variables by which a child finds programs, libraries and devices; `passed` are further names."""
    return {
        name: value for name, value in environment.items() if name in passed or _passes(name.upper(), value)
    }


def _passes(name: str, value: str) -> bool:
    if _SECRET.search(name) or ("@" in value and name.endswith("_PROXY")):  # user:password@host
        return False
    return bool(_NAME.fullmatch(name) or _FAMILY.match(name) or _VENDOR.match(name))
