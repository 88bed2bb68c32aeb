"""Packages that make torch know a device when they are imported."""

from __future__ import annotations

import sys

NAMES = ("torch_npu",)


def hide() -> None:
    """Keep libraries, which import one if they find it, from it: torch has room for one such device."""
    for name in NAMES:
        sys.modules[name] = None  # type: ignore[assignment]
