"""The first part and the last: devices with their free memory, and what the others have left behind.

The first also makes a small model for all other parts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from isotrain.children import is_held
from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.detect import choose_device
from isotrain.tools.doctor.self_test.run import MARK, marked
from isotrain.tools.doctor.self_test.verdicts import Reporter, SelfTestSetting, StageFailed, own_setting
from isotrain.weights.file import PREFIX, remove_abandoned

# An engine and a trainer share each device, and neither knows of other programs.
LEAST_FREE = 0.6
# Ended processes take a moment to be gone, and drivers to take their memory back.
PATIENCE = 20.0
# Free memory of a device moves a little by itself.
MARGIN = 64 << 20


def main() -> None:
    setting = own_setting()
    if setting.mode == "leftovers":
        find_leftovers(setting)
    else:
        count_devices(setting)


def count_devices(setting: SelfTestSetting) -> None:
    with Reporter(setting.verdicts).stage("devices") as stage:
        device = choose_device(setting.device)
        count = device.count()
        stage.metrics["devices"] = float(count)
        if device.visible_devices_variable:
            for number in range(count):
                device.activate(number)
                memory = device.memory()
                # Numbers with zeros, as they are sorted by name.
                stage.metrics[f"free bytes on device {number:04d}"] = float(memory.free)
                if memory.free < LEAST_FREE * memory.total:
                    used, total = ((memory.total - memory.free) / 2**30, memory.total / 2**30)
                    raise StageFailed(
                        f"device {number}: {used:.1f} of {total:.1f} GB are in use; choose idle devices with "
                        f"{device.visible_devices_variable}"
                    )
        # Heads of 64, grouped: attention kernels of devices take these and not always smaller ones.
        make_tiny(setting.tiny, train_rows=2000, validation_rows=32, hidden=256, heads=4, kv_heads=2)
        what = "cores" if device.type == "cpu" else "devices"
        stage.result = f"{count} {what}, {device.name()}"


def find_leftovers(setting: SelfTestSetting) -> None:
    with Reporter(setting.verdicts).stage("memory-returned") as stage:
        deadline = time.monotonic() + PATIENCE
        while left := [*_processes(), *_shared_memory(setting), *_device_memory(setting)]:
            if time.monotonic() > deadline:
                raise StageFailed("; ".join(left))
            time.sleep(0.5)
        devices = f"; the memory of {len(setting.free)} devices is free again" if setting.free else ""
        stage.result = f"no process or shared memory is left{devices}"


def _processes() -> list[str]:
    left = [process for process in marked(os.environ[MARK]) if process != os.getpid()]
    return [f"processes that still run: {', '.join(map(_name, left))}"] if left else []


def _name(process: int) -> str:
    try:
        return f"{process} ({Path(f'/proc/{process}/comm').read_text().strip()})"
    except OSError:
        return str(process)


def _shared_memory(setting: SelfTestSetting) -> list[str]:
    """Whoever still holds a directory is either among `_processes` or another program of this user."""
    root = Path("/dev/shm")
    if setting.killed:  # what was killed could not remove them
        remove_abandoned(root, age=1.0)
    left = [path.name for path in root.glob(f"{PREFIX}*") if _is_left(path, setting.started)]
    return [f"weights are left in /dev/shm: {', '.join(left)}"] if left else []


def _is_left(path: Path, started: float) -> bool:
    try:
        status = path.stat()
        return status.st_uid == os.getuid() and status.st_mtime >= started and not is_held(path)
    except OSError:
        return False


def _device_memory(setting: SelfTestSetting) -> list[str]:
    device, left = choose_device(setting.device), []
    for number, before in enumerate(setting.free):
        device.activate(number)
        lost = before - device.memory().free
        if lost > MARGIN:
            left.append(
                f"device {number} has {lost / 2**20:.0f} MB less free memory than before, unless another "
                "program uses it now"
            )
    return left


if __name__ == "__main__":
    main()
