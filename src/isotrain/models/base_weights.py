"""Reads a model's own tensors from the published files that it began with, one at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from isotrain.errors import ModelError
from isotrain.models.conversion import Conversion, conversions
from isotrain.models.weights import WeightFiles


class BaseWeights:
    """The tensors `own` of a model, as far as the files of its directory have them."""

    def __init__(self, model: PreTrainedModel, own: Iterable[str], directory: Path) -> None:
        self._model = model
        self._files = WeightFiles(directory)
        self._made_by: dict[str, Conversion] = {}
        for conversion in conversions(model, own, self._files.file_of):
            for name in self._targets(conversion):
                self._made_by[name] = conversion

    def __contains__(self, name: str) -> bool:
        return name in self._made_by

    def read(self, name: str) -> torch.Tensor:
        """In the type of the files; it may be the file's own memory, so it must not be changed."""
        if name not in self._made_by:
            raise ModelError(f"{self._files.directory} has no weights for '{name}'")
        return self._made_by[name].convert(self._model, self._files.whole)[name]

    def _targets(self, conversion: Conversion) -> list[str]:
        if conversion.converter is None or len(conversion.converter.target_patterns) == 1:
            return [conversion.target]
        # Which parameters come of it is found out without reading anything.
        return list(conversion.convert(self._model, self._files.described))
