"""Checks before every run, in milliseconds."""

from __future__ import annotations

import os

from isotrain.doctor.examine import examine
from isotrain.doctor.facts import find_toolkit, is_simulated, relevant
from isotrain.doctor.matrix import TARGETS
from isotrain.doctor.system import System, ThisMachine
from isotrain.errors import DeviceError
from isotrain.hidden_modules import hide
from isotrain.language import listed, tr
from isotrain.recipe.schema import Recipe

# Without commands it is not known what the machine has.
_SEEN_ONLY_BY_COMMANDS = {"no-gpu-visible", "no-npu-visible", "driver-not-mounted"}


def preflight(recipe: Recipe, system: System | None = None) -> list[str]:
    """Refuse a run that would fail, with the findings of `isotrain doctor`; returns the warnings.

    With `device.type: auto` nothing is refused: another device may be taken.
    """
    kind = recipe.device.type
    target = kind if kind in TARGETS else None
    report = examine(system or ThisMachine(), target, recipe, commands=False)
    told = [finding for finding in report.findings if finding.id not in _SEEN_ONLY_BY_COMMANDS]
    errors = [finding for finding in told if finding.level == "error"]
    if errors and target is not None:
        lines = [listed((finding.problem, finding.remedy), "\n  -> ") for finding in errors]
        where = tr("run `isotrain doctor` for details and the nearest stack")
        raise DeviceError(listed([*lines, where], "\n"))
    # The simulated device says itself what it is.
    return [
        listed((finding.problem, finding.remedy), "; ")
        for finding in told
        if finding.level != "note" and finding.id != "simulated-device"
    ]


def hide_a_plugin_that_cannot_load(system: System | None = None) -> None:
    """Keep torch and transformers from importing torch_npu where its libraries are not there.

    torch would import it by itself, transformers wherever it finds it, and both would end this process.
    """
    system = system or ThisMachine()
    plugin = system.packages(["torch-npu"]).get("torch-npu")
    if plugin is None or is_simulated(plugin):  # every command asks this, and nearly all end here
        return
    home, _ = find_toolkit(system, relevant(system.variables))
    if home is None:
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        hide("torch_npu")
