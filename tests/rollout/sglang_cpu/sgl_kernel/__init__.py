"""Stands in for SGLang's compiled kernels, which have no wheel for CPUs: names exist, and refuse calls."""

from __future__ import annotations

from typing import Any, NoReturn

__version__ = "0"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} is not built for this processor")

    return absent
