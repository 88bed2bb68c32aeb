"""A machine in a few lines, for people."""

from __future__ import annotations

import re
from collections import Counter

from isotrain.doctor.examine import Report

_SHOWN = re.compile("torch(-npu)?|transformers|ray|vllm(-ascend|-cpu)?|sglang|triton-ascend")


def describe(report: Report) -> list[tuple[str, str]]:
    """Names and values of what counts most for the device that is asked about."""
    facts = report.facts
    lines = [
        ("machine", f"{facts.machine}, Python {facts.python}" + (", a container" if facts.container else ""))
    ]
    if report.target == "npu":
        devices = Counter(npu.name for npu in facts.npus)
        shown = ", ".join(f"{count} x {name}" for name, count in devices.items())
        files = f"{len(facts.npu_devices)} device files" if facts.npu_devices else "none seen"
        lines += [
            ("devices", shown or files),
            ("driver", (facts.driver or "none") + (f", firmware {facts.firmware}" if facts.firmware else "")),
            ("CANN", f"{facts.cann} in {facts.cann_home}" if facts.cann else "none"),
        ]
    elif report.target == "cuda":
        gpus = Counter(gpu.name for gpu in facts.gpus)
        lines += [
            ("devices", ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "none seen"),
            ("driver", facts.gpus[0].driver if facts.gpus else "none"),
        ]
    packages = [f"{name} {version}" for name, version in facts.packages.items() if _SHOWN.fullmatch(name)]
    return [*lines, ("packages", ", ".join(packages) or "none")]
