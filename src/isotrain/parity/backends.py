"""Backends to compare on one machine: devices, and instruction sets of the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from isotrain.errors import RecipeError


@dataclass(frozen=True)
class Backend:
    """A backend, with its name in tables."""

    label: str
    type: str
    """`device.type` of its runs."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment of its processes; read when torch is imported."""


# The host's libraries choose the best instructions they find; each may be held below them.
_HOST = {
    "cpu": {},
    "cpu-amx": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"},
    "cpu-avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "cpu-avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
# What a processor must have, so that a label is not another name for what it does anyway.
_NEEDED = {"cpu-amx": "amx_tile", "cpu-avx512": "avx512f", "cpu-avx2": "avx2"}
_ACCELERATORS = ("cuda", "npu")


def backend(label: str) -> Backend:
    if label in _HOST:
        return Backend(label, "cpu", _HOST[label])
    if label in _ACCELERATORS:
        return Backend(label, label)
    known = ", ".join([*_HOST, *_ACCELERATORS])
    raise RecipeError(f"--devices: {label!r} is unknown; use two of {known}")


def missing_instructions(label: str, features: Collection[str]) -> str | None:
    """The instructions that the label promises and a processor does not have."""
    needed = _NEEDED.get(label)
    return needed if needed is not None and needed not in features else None


def label_of(device_type: str, variables: Mapping[str, object]) -> str:
    """The backend that a run used, from its recorded variables."""
    if device_type != "cpu":
        return device_type
    held = {name: variables[name] for name in _HOST["cpu-avx2"] if name in variables}
    return next((label for label, wanted in _HOST.items() if wanted == held), "cpu")
