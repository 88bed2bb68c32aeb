"""Modules that are installed but cannot be imported: to this process and its children they are absent."""

from __future__ import annotations

import os
import sys

_VARIABLE = "ISOTRAIN_HIDDEN_MODULES"


def hide(module: str) -> None:
    os.environ[_VARIABLE] = ",".join({*_hidden(), module})
    hide_what_a_parent_hid()


def hide_what_a_parent_hid() -> None:
    for module in _hidden():
        # Python's own sign for a module that is not to be found.
        sys.modules.setdefault(module, None)  # type: ignore[arg-type]


def _hidden() -> list[str]:
    return [module for module in os.environ.get(_VARIABLE, "").split(",") if module]
