"""Commands that run a module of isotrain in another process."""

from __future__ import annotations

import sys


def module_arguments(module: str, *arguments: str) -> tuple[str, ...]:
    """For this Python. Never the working directory first: a file json.py there is not meant for isotrain."""
    safe_path = ("-P",) if sys.version_info >= (3, 11) else ()
    return (*safe_path, "-m", module, *arguments)


def module_command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, *module_arguments(module, *arguments)]
