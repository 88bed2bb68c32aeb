"""transformers turns queries and keys by a function of the model's module: this gives one layer another one.

Its hooks for such functions (`use_kernelized_func`) do nothing without the `kernels` package, and with it
take code from the Hub or a directory, not a function. The forward is that of the class, word for word, with
the one global name bound anew; class and module are left alone, and with them all other models.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import __version__

NAME = "apply_rotary_pos_emb"
# The bounds of pyproject.toml: a new version is looked at before it is let in.
FIRST, BELOW = (5, 5), (5, 20)
VERSION = tuple(int(number) for number in __version__.split(".")[:2])

Rotate = Callable[..., Any]


def rotation_of(layer: nn.Module) -> Rotate | None:
    """The function by which an attention layer turns queries and keys; None where it cannot be replaced."""
    forward = type(layer).forward
    if not FIRST <= VERSION < BELOW or not isinstance(forward, FunctionType):
        return None
    loads = (step for step in dis.get_instructions(forward) if step.opname == "LOAD_GLOBAL")
    found = forward.__globals__.get(NAME) if any(step.argval == NAME for step in loads) else None
    return found if callable(found) else None


def replace_rotation(layer: nn.Module, rotate: Rotate) -> None:
    """`rotate` takes what `rotation_of` takes."""
    forward = type(layer).forward
    assert isinstance(forward, FunctionType)
    names = {**forward.__globals__, NAME: rotate}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    layer.forward = MethodType(own, layer)
