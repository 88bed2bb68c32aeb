"""Devices, their drivers, and the masks that hide them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.version import Version

from isotrain.language import tr
from isotrain.tools.doctor.facts import is_number
from isotrain.tools.doctor.matrix import matrix, order
from isotrain.tools.doctor.rules import MachineFinding, Scene

_MASK = "ASCEND_RT_VISIBLE_DEVICES"
_MOUNTS = tr(
    "start it with --device /dev/davinci0 (one per device) --device /dev/davinci_manager "
    "--device /dev/devmm_svm --device /dev/hisi_hdc -v /usr/local/Ascend/driver:/usr/local/Ascend/driver "
    "-v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi"
)


def check(scene: Scene) -> Iterator[MachineFinding]:
    if scene.target == "npu" and not scene.facts.simulated:
        yield from _mask(scene)
        yield from _npus(scene)
        yield from _driver(scene)
    elif scene.target == "cuda":
        yield from _gpus(scene)


def visible(scene: Scene) -> int | None:
    """Devices that a process would see; None where that is not known, or where cores are the devices."""
    facts = scene.facts
    if scene.target == "cpu":
        return None
    if scene.target == "cuda":
        mask = facts.variables.get("CUDA_VISIBLE_DEVICES")
        present = len(facts.gpus)
    else:
        mask = facts.variables.get(_MASK)
        present = len(facts.npus) or len(facts.npu_devices)
    if not present:
        return None
    return present if mask is None else min(present, len([part for part in mask.split(",") if part.strip()]))


def _mask(scene: Scene) -> Iterator[MachineFinding]:
    text = scene.facts.variables.get(_MASK)
    if text is None:
        return
    parts = [part.strip() for part in text.split(",")]
    if not all(is_number(part) for part in parts):
        problem = tr(
            "{mask}={text} is not a list of device numbers, so no device is visible", mask=_MASK, text=text
        )
        remedy = tr("export {mask}=0,1,... or unset it", mask=_MASK)
        yield MachineFinding("mask-is-not-numbers", "error", problem, remedy)
        return
    numbers = [int(part) for part in parts]
    ascending = sorted(set(numbers))
    if numbers != ascending:
        problem = tr(
            "{mask}={text} is not strictly ascending, so the device count is 0", mask=_MASK, text=text
        )
        remedy = f"export {_MASK}={','.join(map(str, ascending))}"
        yield MachineFinding("mask-out-of-order", "error", problem, remedy)
    facts = scene.facts
    present = {npu.number for npu in facts.npus}
    missing = sorted(set(numbers) - present) if present else []
    if missing:
        # Containers count the devices that they were given from 0, whatever npu-smi calls them.
        counted = facts.container and max(numbers) < len(facts.npus)
        problem = tr(
            "{mask}={text} names devices that this machine does not have: {missing}",
            mask=_MASK,
            text=text,
            missing=", ".join(map(str, missing)),
        )
        remedy = tr("choose among {devices}", devices=",".join(map(str, sorted(present))))
        yield MachineFinding("mask-names-missing-devices", "warning" if counted else "error", problem, remedy)
    if scene.generation == "A3" and not missing and len(ascending) > 1:
        modules = {npu.number: npu.module for npu in scene.facts.npus}
        halves = sorted(
            number
            for number in ascending
            if sum(modules[other] == modules[number] for other in ascending) == 1
        )
        if halves:
            problem = tr(
                "{mask}={text} names one die of a module only ({dies}); jobs on an A3 use whole modules",
                mask=_MASK,
                text=text,
                dies=", ".join(map(str, halves)),
            )
            remedy = tr("name both dies of each module")
            yield MachineFinding("half-modules", "warning", problem, remedy)


def _npus(scene: Scene) -> Iterator[MachineFinding]:
    facts = scene.facts
    if facts.npu_smi and "-8005" in facts.npu_smi:
        problem = tr("npu-smi has no permission to use the driver: {npu_smi}", npu_smi=facts.npu_smi)
        remedy = tr(
            "run as root or as a member of the group HwHiAiUser; in a container also mount the devices"
        )
        yield MachineFinding("no-permission-for-the-driver", "error", problem, remedy)
    elif facts.npu_smi:
        problem = tr("npu-smi fails: {npu_smi}", npu_smi=facts.npu_smi)
        remedy = tr("check `dmesg` and the driver's installation (npu-smi info -t board -i 0)")
        yield MachineFinding("npu-smi-fails", "error", problem, remedy)
    elif not facts.npus and not facts.npu_devices:
        inside = facts.container
        problem = (
            tr("no NPU is visible in this container") if inside else tr("no NPU is visible on this machine")
        )
        remedy = _MOUNTS if inside else tr("install the driver and firmware, or use device.type=cpu")
        yield MachineFinding("no-npu-visible", "error", problem, remedy)
    elif facts.npu_smi is None and facts.driver is None:
        problem = tr("device files exist, but npu-smi and the driver's directory are missing")
        remedy = _MOUNTS if facts.container else tr("install the driver")
        yield MachineFinding("driver-not-mounted", "error", problem, remedy)
    mask = facts.variables.get(_MASK)
    used = None if mask is None else {part.strip() for part in mask.split(",")}
    for npu in facts.npus:
        if npu.health not in ("OK", "-") and (used is None or str(npu.number) in used):
            problem = tr(
                "device {number} ({name}) reports {health}",
                number=npu.number,
                name=npu.name,
                health=npu.health,
            )
            remedy = tr(
                "leave it out of {mask}, and see npu-smi info -t health -i {module}",
                mask=_MASK,
                module=npu.module,
            )
            yield MachineFinding("unhealthy-device", "error", problem, remedy)
    if facts.npu_holders:
        problem = tr(
            "other processes use devices: {devices}",
            devices=", ".join(map(str, sorted(set(facts.npu_holders)))),
        )
        remedy = tr("wait for them, or choose free devices with {mask}", mask=_MASK)
        yield MachineFinding("devices-in-use", "warning", problem, remedy)
    if facts.npus and scene.generation in (None, "A1", "inference only"):
        name = facts.npus[0].name
        if scene.generation:
            problem = tr(
                "{name} is {generation} hardware: no published stack trains on it",
                name=name,
                generation=scene.generation,
            )
        else:
            problem = tr("{name} is not in the matrix: no published stack trains on it", name=name)
        remedy = tr("expect problems; docs/stacks.md has the matrix")
        yield MachineFinding("unknown-hardware", "warning", problem, remedy)


def _driver(scene: Scene) -> Iterator[MachineFinding]:
    facts = scene.facts
    if facts.driver and facts.firmware and order(facts.driver) != order(facts.firmware):
        newer = max(facts.driver, facts.firmware, key=order)
        problem = tr(
            "the driver is from release {driver}, the firmware from {firmware}",
            driver=facts.driver,
            firmware=facts.firmware,
        )
        remedy = tr("install driver and firmware of the same release, such as {newer}", newer=newer)
        yield MachineFinding("driver-and-firmware", "warning", problem, remedy)
    if not facts.driver or not facts.cann:
        return
    published = [
        stack.hdk
        for stack in matrix().stacks
        if stack.hdk and stack.cann and order(stack.cann) <= order(facts.cann)
    ]
    # The driver of the newest stack that is not newer than this toolkit.
    needed = max(published, key=order, default=None)
    if needed and order(facts.driver) < order(needed):
        problem = tr(
            "stacks up to CANN {cann} need driver {wanted}; this machine has {driver}",
            cann=facts.cann,
            wanted=needed,
            driver=facts.driver,
        )
        remedy = tr("install driver {wanted} or newer on the host, or an older CANN", wanted=needed)
        yield MachineFinding("driver-older-than-cann", "warning", problem, remedy)


def _gpus(scene: Scene) -> Iterator[MachineFinding]:
    facts = scene.facts
    torch = facts.packages.get("torch", "")
    if torch.endswith("+cpu"):
        problem = tr("torch {torch} is a CPU build", torch=torch)
        remedy = tr(
            "pip install torch=={version} (a CUDA build), or use device.type=cpu",
            version=torch.removesuffix("+cpu"),
        )
        yield MachineFinding("cpu-build-of-torch", "error", problem, remedy)
    if not facts.gpus:
        why = facts.nvidia_smi or (
            tr("nvidia-smi is not installed") if facts.nvidia_smi is None else tr("it lists none")
        )
        problem = tr("no NVIDIA GPU is visible: {why}", why=why)
        remedy = (
            tr("start the container with --gpus all")
            if facts.container
            else tr("install the driver, or use device.type=cpu")
        )
        yield MachineFinding("no-gpu-visible", "error", problem, remedy)
        return
    build = re.search(r"\+cu(\d{2})\d", torch)
    needed = matrix().cuda_driver.get(build[1]) if build else None
    driver = facts.gpus[0].driver
    if build and needed and Version(driver) < Version(needed):
        problem = tr(
            "torch {torch} needs driver {wanted} or newer; this machine has {driver}",
            torch=torch,
            wanted=needed,
            driver=driver,
        )
        remedy = tr(
            "update the driver, or install a torch built for an older CUDA than {cuda}", cuda=build[1]
        )
        yield MachineFinding("old-nvidia-driver", "error", problem, remedy)
