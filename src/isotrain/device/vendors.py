"""Facts about vendors that need no torch: data sheets of devices, for plans, and packages that torch loads.

Names are what people type. None of it was measured here. Where vendors publish no figure, the value is the
lower of those that users report, and `confirmed` is False.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


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
    confirmed: bool = True


DEVICES = {
    "a2": DataSheet("Ascend 910B, Atlas A2", 64, 295, 1.6, 196, 25, 8, confirmed=False),
    "a3": DataSheet("Ascend 910C die, Atlas A3", 64, 376, 1.6, 196, 50, 16, confirmed=False),
    "a100": DataSheet("NVIDIA A100 80GB SXM", 80, 312, 2.04, 300, 25, 8),
    "h20": DataSheet("NVIDIA H20", 96, 148, 4.0, 450, 50, 8),
    "h100": DataSheet("NVIDIA H100 SXM", 80, 989, 3.35, 450, 50, 8),
    "h200": DataSheet("NVIDIA H200 SXM", 141, 989, 4.8, 450, 50, 8),
}

# Importing one of them makes torch know a device.
PACKAGES = ("torch_npu",)


def hide_packages() -> None:
    """Keep libraries, which import one if they find it, from it: torch has room for one such device."""
    for name in PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]
