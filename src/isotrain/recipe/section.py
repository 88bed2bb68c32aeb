"""The base of every part of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict

_Section = TypeVar("_Section", bound="Section")  # `typing.Self` is of Python 3.11


@dataclass(frozen=True)
class DefaultFor:
    """What an unwritten field is instead of its default where the recipe chose `case` elsewhere."""

    case: str
    value: Any


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    needs: ClassVar[Mapping[str, str]] = {}
    """Top-level sections that must be there with this one: what for, and what to write."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Top-level sections that must not be there with this one, and why."""

    def for_case(self: _Section, case: str) -> _Section:
        """This section with the defaults that it has in that case."""
        others = {
            name: item.value
            for name, info in type(self).model_fields.items()
            for item in info.metadata
            if isinstance(item, DefaultFor) and item.case == case and name not in self.model_fields_set
        }
        return self.model_copy(update=others) if others else self


class OfflineSection(Section):
    """An algorithm that learns from what is in its data."""

    refuses: ClassVar[Mapping[str, str]] = {
        "rollout": "samples no responses",
        "reward": "scores no responses",
        "cluster": "runs without one",
    }
