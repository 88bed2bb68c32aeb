"""Devices of runs: backends of the machine, meshes of ranks, simulated devices."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from isotrain.errors import RecipeError
from isotrain.language import tr
from isotrain.recipe.schema import MeshSection
from isotrain.tools.parity.run import ROLES, RunLog, section

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
    "cpu-default": {"ATEN_CPU_CAPABILITY": "default"},  # torch's kernels without vectors, on every processor
}
# What a processor must have, so that a label is not another name for what it does anyway.
_NEEDED = {"cpu-amx": "amx_tile", "cpu-avx512": "avx512f", "cpu-avx2": "avx2"}
_ACCELERATORS = ("cuda", "npu")
_SLUG = 40
_WAYS = {"auto": "auto", "ulysses": "Ulysses", "ring": "ring"}


@dataclass(frozen=True)
class Backend:
    """A backend, with its name in tables."""

    label: str
    type: str
    """`device.type` of its runs."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment of its processes; read when torch is imported."""


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
    return next((label for label, variables_of_label in _HOST.items() if variables_of_label == held), "cpu")


def device_label(environment: Mapping[str, Any]) -> str:
    """The device's name in tables: its type, a host's instruction set, and whether it was simulated."""
    device_type = slug(str(section(environment, "device").get("type", "unknown")))
    label = label_of(device_type, section(environment, "variables"))
    return f"{label}-simulated" if is_simulated(environment) else label


def is_simulated(environment: Mapping[str, Any]) -> bool:
    """Whether a stand-in for the device computed, which marks its packages and its device's name."""
    device = section(environment, "device")
    versions = map(str, section(environment, "packages").values())
    on_host = device.get("type") == "cpu"
    marked = any(version.endswith("+sim") for version in versions) or str(device.get("name")).endswith("-sim")
    return not on_host and marked


def slug(text: str) -> str:
    """Text of any source as a part of a file's name: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:_SLUG].strip("-") or "unnamed"


def mesh_of(device: Mapping[str, Any]) -> dict[str, Any]:
    """The mesh in a section `device`, without fields that change nothing; empty without a mesh."""
    given = {name: value for name, value in section(device, "mesh").items() if value is not None}
    defaults = MeshSection().model_dump()
    used = {name: value for name, value in given.items() if value != defaults.get(name)}
    if "context" in used:
        used["context_attention"] = given.get("context_attention", defaults["context_attention"])
    else:
        used.pop("context_attention", None)
    return used


def mesh_words(device: Mapping[str, Any]) -> str:
    """`context 2 (ring)` for tables and file names, empty without a mesh; never a stranger's words."""
    mesh = mesh_of(device)
    words = []
    for name in ("context", "replicas", "expert"):
        if name in mesh:
            count = mesh[name] if isinstance(mesh[name], int) else "unknown"
            way = f" ({_WAYS.get(str(mesh['context_attention']), 'unknown')})" if name == "context" else ""
            words.append(f"{name} {count}{way}")
    return ", ".join(words)


def uses_ring(device: Mapping[str, Any]) -> bool:
    return mesh_of(device).get("context_attention") == "ring"


def why_untraced(reference: RunLog, candidate: RunLog) -> str | None:
    """Why two runs have no layers to compare, where a mesh divides them over ranks."""
    for role, run in (("reference", reference), ("candidate", candidate)):
        if mesh := mesh_words(section(run.recipe, "device")):
            return tr(
                "not recorded: the {role} divides its layers over ranks ({mesh})", role=ROLES[role], mesh=mesh
            )
    return None
