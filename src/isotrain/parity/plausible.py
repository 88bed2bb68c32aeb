"""Whether a run can have used the device that it names: what its vendor calls it, and needs beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from isotrain.parity.backends import missing_instructions
from isotrain.parity.certificate import Side
from isotrain.parity.run import section

_DEVICES = ("cpu", "cuda", "npu")
_OF_CUDA = re.compile(r"NVIDIA|GeForce|Tesla|Quadro|AMD|Instinct|Radeon")
_OF_ARM = re.compile(r"asimd|sve|i8mm")
_OF_X86 = re.compile(r"avx|amx|fma$")


def implausible(side: Side) -> Iterator[str]:
    """What speaks against it, one sentence each."""
    yield from _device(side)
    yield from _versions(side)
    yield from _processor(side)


def _device(side: Side) -> Iterator[str]:
    device = section(side.environment, "device")
    kind, name = device.get("type"), str(device.get("name"))
    if kind not in _DEVICES:
        yield f"device type {kind!r} is none of {', '.join(_DEVICES)}"
    if side.settings.get("type") not in (kind, "auto"):
        yield f"the recipe asks for device {side.settings.get('type')!r}, the run used {kind!r}"
    host = section(side.environment, "cpu").get("model")
    if kind == "cpu" and name != host:
        yield f"it ran on the processor, which is {host!r}, not {name!r}"
    if kind != "cpu" and name == host:
        yield f"the device has the processor's name, {name!r}"
    if (kind == "npu") != name.startswith("Ascend"):
        yield f"a device of type {kind!r} is not called {name!r}"
    if kind == "cuda" and not _OF_CUDA.search(name):
        yield f"a device of type 'cuda' is not called {name!r}"


def _versions(side: Side) -> Iterator[str]:
    kind, packages = section(side.environment, "device").get("type"), side.packages
    missing = [name for name in ("isotrain", "torch", "transformers") if name not in packages]
    if kind == "npu" and "torch-npu" not in packages:
        missing.append("torch-npu")
    if missing:
        yield f"it cannot have run without {', '.join(missing)}"
        return
    torch = packages["torch"]
    if kind == "npu" and _minor(packages["torch-npu"]) != _minor(torch):
        yield f"torch-npu {packages['torch-npu']} does not load with torch {torch}"
    if kind == "cuda" and torch.endswith("+cpu"):
        yield f"torch {torch} is built without CUDA"


def _processor(side: Side) -> Iterator[str]:
    machine = str(side.environment.get("machine"))
    found = section(side.environment, "cpu").get("features")
    features = [str(feature) for feature in found] if isinstance(found, list) else []
    if machine not in str(side.environment.get("platform")):
        yield f"the platform is {side.environment.get('platform')!r}, the machine {machine!r}"
    foreign = {"x86_64": _OF_ARM, "aarch64": _OF_X86}.get(machine)
    if foreign and (other := [feature for feature in features if foreign.match(feature)]):
        yield f"a machine of type {machine} has no {other[0]}"
    on_host = section(side.environment, "device").get("type") == "cpu"
    if on_host and (missing := missing_instructions(side.label, features)):
        yield f"it is called {side.label}, but the processor has no {missing}"


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]
