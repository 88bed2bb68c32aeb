"""The device that a recipe names."""

from __future__ import annotations

from isotrain.device.accelerator import CUDA
from isotrain.device.base import Device
from isotrain.device.cpu import Cpu
from isotrain.device.npu import NPU
from isotrain.device.vendors import check_kind
from isotrain.errors import DeviceError

# In the order in which `auto` prefers them.
DEVICES: dict[str, Device] = {"cuda": CUDA, "npu": NPU, "cpu": Cpu()}


def choose_device(name: str) -> Device:
    """The device of that name, or the best one present for `auto`."""
    device = find_device(name)
    if not device.available():
        present = [other for other, candidate in DEVICES.items() if candidate.available()]
        raise DeviceError(
            f"device.type: no '{name}' device is usable here (usable: {', '.join(present)}); "
            "check the driver and the PyTorch build, or set device.type=auto"
        )
    return device


def find_device(name: str) -> Device:
    """The same for a process that may not see the devices which others work with."""
    if name == "auto":
        return next(device for device in DEVICES.values() if device.available())
    check_kind(name)
    return DEVICES[name]
