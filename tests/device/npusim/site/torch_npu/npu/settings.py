"""Switches of the Ascend runtime that the simulation remembers and never acts on."""

import functools
from types import SimpleNamespace
from typing import Any

import torch

matmul = SimpleNamespace(allow_hf32=False)
conv = SimpleNamespace(allow_hf32=True)
amp = SimpleNamespace(
    autocast=functools.partial(torch.autocast, "npu"),
    GradScaler=functools.partial(torch.amp.GradScaler, "npu"),
)

_options: dict[str, Any] = {"jit_compile": "disable"}


def set_compile_mode(jit_compile: bool = False) -> None:
    """Whether operators would be compiled for their shapes."""
    _options["jit_compile"] = "enable" if jit_compile else "disable"


def is_jit_compile_false() -> bool:
    """The state that `set_compile_mode` left."""
    return _options["jit_compile"] == "disable"


def set_option(option: dict[str, Any]) -> None:
    """Options of the runtime, by name."""
    _options.update(option)
