"""The sandbox that a recipe or a tool names."""

from __future__ import annotations

from isotrain.sandbox.base import Limits, Sandbox
from isotrain.sandbox.bubblewrap import Bubblewrap
from isotrain.sandbox.fusion import SandboxFusion

BUBBLEWRAP = "bubblewrap"


def build_sandbox(where: str, limits: Limits, python: str | None = None) -> Sandbox:
    """`where`: `bubblewrap`, or the address of a SandboxFusion server, which has a Python of its own."""
    return Bubblewrap(limits, python) if where == BUBBLEWRAP else SandboxFusion(where, limits)
