"""Published tensors to a model's own, or back, through transformers' conversions.

transformers keeps the experts of a layer in one parameter; published files hold a tensor for each of them.
Which tensors make which parameter, and how, is transformers' knowledge: nothing of it is repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from isotrain.errors import ModelError

Read = Callable[[str], torch.Tensor]


@dataclass
class Conversion:
    """The published tensors from which transformers makes one parameter, or several at once."""

    target: str
    """The parameter's name; the first one's, where there are several."""
    converter: WeightConverter | None
    """None where the tensor is used as it is, whatever its published name."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Published names by the pattern they match, in the order in which transformers takes them."""

    @property
    def stacks(self) -> bool:
        """Whether the first dimension counts published tensors, as that of fused experts does."""
        if self.converter is None:
            return False
        first, *rest = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and len(rest) <= 1
            and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in rest)
        )

    @property
    def stacked(self) -> int:
        """How many: the least of all patterns, so that a missing tensor is noticed."""
        return min(len(names) for names in self.sources.values())

    def parts(
        self, part: tuple[slice, ...], shape: Callable[[str], tuple[int, ...]]
    ) -> dict[str, tuple[slice, ...]]:
        """The part to read of each stacked tensor that a part of the parameter is made of.

        `shape` is that of a published tensor; one that gives nothing to the part has an empty one.
        """
        assert self.converter is not None and self.stacks
        stacked, *rest = part
        joined = [cast(Concatenate, operation).dim - 1 for operation in self.converter.operations[1:]]
        read_parts, start = dict[str, tuple[slice, ...]](), 0
        # transformers joins patterns in this order, whatever the order in which they were found.
        for pattern in filter(self.sources.__contains__, self.converter.source_patterns):
            names, piece = self.sources[pattern], list(rest)
            for dim in joined:
                size = shape(names[0])[dim]
                begin, end = (min(max(at - start, 0), size) for at in (rest[dim].start, rest[dim].stop))
                piece[dim] = slice(begin, end)
                start += size
            read_parts |= dict.fromkeys(names[stacked], tuple(piece))
        return read_parts

    def convert(
        self, model: PreTrainedModel, read: Read, stacked: slice = slice(None)
    ) -> dict[str, torch.Tensor]:
        """Parameters by name; of stacked tensors, only the given ones are read and put together."""
        if self.converter is None:
            ((name, *_),) = self.sources.values()
            return {self.target: read(name)}
        converter = deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names[stacked]:
                # A call is taken as well as a future: the tensor is read when it is needed.
                converter.add_tensor(self.target, name, pattern, cast(Any, partial(read, name)))
        try:
            made = converter.convert(self.target, model=model, config=model.config)
        except (RuntimeError, ValueError) as error:
            counts = ", ".join(f"{len(names)} of {pattern}" for pattern, names in self.sources.items())
            raise ModelError(
                f"'{self.target}' cannot be made from its tensors ({counts}): {error}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def conversions(
    model: PreTrainedModel, parameters: Iterable[str], published: Iterable[str]
) -> list[Conversion]:
    """How these tensors of the model come from published ones; those that nothing needs are left out."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known, prefix = dict.fromkeys(parameters, True), model.base_model_prefix
    by_target: dict[str, Conversion] = {}
    # transformers' own order: experts by number, not by the digits of it.
    for name in sorted(published, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            # Files can also hold a tensor under the name that a conversion would have made.
            target, pattern = name, None
        if target not in known:
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        conversion = by_target.setdefault(target, Conversion(target, converter))
        conversion.sources.setdefault(pattern or target, []).append(name)
    return [by_target[name] for name in known if name in by_target]


class Publisher:
    """Gives a model's tensors the names and shapes of published files, parameter by parameter."""

    def __init__(self, model: PreTrainedModel, transforms: Sequence[WeightTransform] | None = None) -> None:
        self.model = model
        if transforms is None:
            known = get_model_conversion_mapping(model, add_legacy=False)
            # What was stripped from names in files may not have been there: transformers does not add it
            # either.
            transforms = [t for t in known if type(t).__name__ != "PrefixChange"]
        self._transforms = list(transforms)

    @classmethod
    def as_loaded(cls, model: PreTrainedModel) -> Publisher:
        """As the files are that `from_pretrained` has read: it notes which conversions they needed."""
        return cls(model, getattr(model, "_weight_conversions", None))

    def __call__(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if self._merged_into(name) is not None:
            raise ModelError(
                f"'{name}' is published in one tensor with other parameters, which engines cannot be sent yet"
            )
        yield from self.together({name: tensor}).items()

    def groups(self, names: Iterable[str]) -> list[list[str]]:
        """Parameters that are published in one tensor side by side, all others alone."""
        merged: dict[str, list[str]] = {}
        for name in names:
            merged.setdefault(self._merged_into(name) or name, []).append(name)
        return list(merged.values())

    def together(self, group: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of one of the groups, as files have them."""
        if not self._transforms:
            return dict(group)
        # transformers looks for them there; looking them up again for every parameter takes long.
        before = getattr(self.model, "_weight_conversions", None)
        self.model._weight_conversions = self._transforms  # type: ignore[assignment]
        try:
            published: dict[str, torch.Tensor] = revert_weight_conversion(self.model, dict(group))
        finally:
            self.model._weight_conversions = before  # type: ignore[assignment]
        return published

    def _merged_into(self, name: str) -> str | None:
        """The published tensor that has this parameter as one of its parts."""
        for transform in self._transforms:
            if len(transform.target_patterns) > 1:
                published, pattern = transform.reverse_transform().rename_source_key(name)
                if pattern is not None:
                    return published
        return None


def published_shapes(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an update of these tensors; nothing is computed with them."""
    publish = Publisher(model)
    return {
        published: tuple(tensor.shape)
        for name, parameter in tensors.items()
        for published, tensor in publish(name, parameter.detach().to("meta"))
    }


def stored_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are part of the weights, such as the correction of DeepSeek's router."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


WholeParameter = tuple[Conversion, dict[str, torch.Tensor]]
"""How parameters are made, and all that they are made of."""


class PublishedParts:
    """Published tensors that wait for others: those of one parameter may come in any order."""

    def __init__(self, plan: Sequence[Conversion]) -> None:
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}
        self._conversions = {
            name: conversion for conversion in plan for names in conversion.sources.values() for name in names
        }

    def __contains__(self, published: str) -> bool:
        return published in self._conversions

    def add(self, published: str, tensor: torch.Tensor) -> WholeParameter | None:
        """Take a tensor; returns the parameter that is complete with it, if one is."""
        conversion = self._conversions[published]
        sources = self._waiting.setdefault(conversion.target, {})
        sources[published] = tensor
        if any(name not in sources for names in conversion.sources.values() for name in names):
            return None
        return conversion, self._waiting.pop(conversion.target)
