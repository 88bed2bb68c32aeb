"""A machine in a few lines, for people."""

from __future__ import annotations

import re
from collections import Counter

from isotrain.doctor.examine import Report
from isotrain.language import tr

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
        found = tr("{count} device files", count=count) if count else tr("none seen")
        driver = facts.driver or none
        if facts.firmware:
            driver = tr("{driver}, firmware {firmware}", driver=driver, firmware=facts.firmware)
        toolkit = tr("{cann} in {home}", cann=facts.cann, home=facts.cann_home) if facts.cann else none
        lines += [(tr("devices"), shown or found), (tr("driver"), driver), ("CANN", toolkit)]
    elif report.target == "cuda":
        gpus = Counter(gpu.name for gpu in facts.gpus)
        shown = ", ".join(f"{count} x {name}" for name, count in gpus.items())
        lines += [
            (tr("devices"), shown or tr("none seen")),
            (tr("driver"), facts.gpus[0].driver if facts.gpus else none),
        ]
    packages = [f"{name} {version}" for name, version in facts.packages.items() if _SHOWN.fullmatch(name)]
    return [*lines, (tr("packages"), ", ".join(packages) or none)]
