"""Find leftovers of the other parts: processes, device memory, shared memory."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from isotrain.device.detect import choose_device
from isotrain.tools.doctor.self_test.run import MARK, marked
from isotrain.tools.doctor.self_test.verdicts import Reporter, SelfTestSetting, StageFailed, own_setting
from isotrain.weights.file import PREFIX

# Ended processes take a moment to be gone, and drivers to take their memory back.
PATIENCE = 20.0
# Free memory of a device moves a little by itself.
MARGIN = 64 << 20


def main() -> None:
    setting = own_setting()
    with Reporter(setting.verdicts).stage("memory-returned") as stage:
        deadline = time.monotonic() + PATIENCE
        while (left := leftovers(setting)) and time.monotonic() < deadline:
            time.sleep(0.5)
        if left:
            raise StageFailed("; ".join(left))
        devices = f"; the memory of {len(setting.free)} devices is free again" if setting.free else ""
        stage.result = f"no process or shared memory is left{devices}"


def leftovers(setting: SelfTestSetting) -> list[str]:
    return [*_processes(), *_shared_memory(setting), *_device_memory(setting)]


def _processes() -> list[str]:
    left = [process for process in marked(os.environ[MARK]) if process != os.getpid()]
    return [f"processes that still run: {', '.join(map(_name, left))}"] if left else []


def _name(process: int) -> str:
    try:
        return f"{process} ({Path(f'/proc/{process}/comm').read_text().strip()})"
    except OSError:
        return str(process)


def _shared_memory(setting: SelfTestSetting) -> list[str]:
    paths = [path for path in Path("/dev/shm").glob(f"{PREFIX}*") if _made_since(path, setting.started)]
    if setting.killed:  # what was killed could not remove them
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
    left = [path.name for path in paths if path.exists()]
    return [f"weights are left in /dev/shm: {', '.join(left)}"] if left else []


def _made_since(path: Path, started: float) -> bool:
    try:
        return path.stat().st_uid == os.getuid() and path.stat().st_mtime >= started
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
