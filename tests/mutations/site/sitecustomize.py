"""Puts the mistake that `ISOTRAIN_MUTATION` names into the modules it is about, as they are imported."""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, change: Callable[[Any], None]) -> None:
        self.loader, self.change = loader, change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.change(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self.changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.changes[name])
        return spec


if os.environ.get("ISOTRAIN_MUTATION"):
    from device_faults import FAULTS
    from mutation_patches import PATCHES

    # A name that is not there must not run as an honest run.
    sys.meta_path.insert(0, _Finder((PATCHES | FAULTS)[os.environ["ISOTRAIN_MUTATION"]]))
