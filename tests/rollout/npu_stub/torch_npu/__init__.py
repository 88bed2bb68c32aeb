"""In place of torch_npu where vllm-ascend is imported without CANN: has every name, computes nothing."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar

import torch
from transformers.utils.import_utils import is_torchvision_available

# Modules that vllm-ascend imports, itself or through vLLM's models, and that a stack for CPUs lacks.
ABSENT = {"acl", "torch_npu"}
if not is_torchvision_available():  # transformers remembers the answer, and will not use the stand-in
    ABSENT.add("torchvision")


def _attribute(name: str) -> Any:
    """A class for what is written like one, since annotations and dataclasses need it."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Anything,), {}) if name[0].isupper() else _Anything()


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        return _attribute(name)


class _Anything(metaclass=_Names):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _attribute(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        value = _attribute(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
sys.modules[__name__].__class__ = _Module
npu = sys.modules["torch.npu"] = torch.npu = _Module("torch.npu")  # type: ignore[attr-defined]
