"""Settings of vLLM on Ascend NPUs, besides those for every device.

Read from vllm-ascend 0.23.0's wheel, which a slow test does again; not run on hardware yet.
"""

from __future__ import annotations

from collections.abc import Mapping

_ALLOCATOR = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def npu_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before vLLM is imported, given those that are there; an empty one is to be removed."""
    # Weights in NZ format cannot take an update; the plug-in refuses to wake up with them.
    changes = {"VLLM_ASCEND_ENABLE_NZ": "0"}
    # The pool that sleeping engines give back refuses expandable segments.
    for name in _ALLOCATOR:
        parts = environment.get(name, "").split(",")
        if any(part.strip() == _EXPANDABLE for part in parts):
            changes[name] = ",".join(part for part in parts if part.strip() != _EXPANDABLE)
    return changes
