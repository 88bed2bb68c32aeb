"""Runs at the start of every interpreter of the environment, before anything is imported.

PyPI's torchvision is built for CUDA. Its import fails on two operators that are not registered, and SGLang,
which serves no images here, only needs the import.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # or it takes this for a machine with CUDA
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # or the first sampled token waits for a C++ compiler

_OPERATORS = ("nms", "qnms")
_kept: list[Any] = []  # a library that is collected takes its operators along


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        from torch.library import Library

        library = Library("torchvision", "DEF")
        for operator in _OPERATORS:
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
