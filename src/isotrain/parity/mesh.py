"""How the ranks of a run divided the work, from its recipe or its recorded environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotrain.language import tr
from isotrain.parity.run import ROLES, Run, section
from isotrain.recipe.schema import MeshSection

_WAYS = {"auto": "auto", "ulysses": "Ulysses", "ring": "ring"}


def mesh_of(device: Mapping[str, Any]) -> dict[str, Any]:
    """What a section `device` says of its mesh, without fields that change nothing; empty without a mesh."""
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


def why_untraced(reference: Run, candidate: Run) -> str | None:
    """Why two runs have no layers to compare, where a mesh divides them over ranks."""
    for role, run in (("reference", reference), ("candidate", candidate)):
        if mesh := mesh_words(section(run.recipe, "device")):
            return tr(
                "not recorded: the {role} divides its layers over ranks ({mesh})", role=ROLES[role], mesh=mesh
            )
    return None
