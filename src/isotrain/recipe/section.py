"""The base of every part of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict

from isotrain.language import tr

_Section = TypeVar("_Section", bound="Section")  # `typing.Self` needs Python 3.11


@dataclass(frozen=True)
class DefaultFor:
    """The default of a field if the recipe chose `case` elsewhere."""

    case: str
    value: Any


class Affects(Enum):
    """Effect of a field on a run, which decides where another value makes another training."""

    EXECUTION = (
        "where, how fast and with which kernels it is computed; the numbers change by rounding at most"
    )
    PACKING = "which samples are computed together"
    COURSE = "how long it trains, what it validates, what happens on failures"
    SOURCE = "whether responses are generated or replayed"
    OUTCOME = "what the model learns"
    RESPONSES = "what the model learns, and which responses it learns from"

    @property
    def may_change_on_resume(self) -> bool:
        """After running out of memory, a user must be able to change what takes memory."""
        return self in (Affects.EXECUTION, Affects.PACKING, Affects.COURSE)

    @property
    def may_differ_in_parity(self) -> bool:
        """Between two runs that are compared as the same training."""
        return self in (Affects.EXECUTION, Affects.SOURCE)

    @property
    def fixed_by_recording(self) -> bool:
        """Whether responses recorded with another value cannot be used."""
        return self is Affects.RESPONSES


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    affects: ClassVar[Affects] = Affects.OUTCOME
    """Effect of its fields; a field that affects something else has it in its annotation."""
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
        "rollout": tr("samples no responses"),
        "reward": tr("scores no responses"),
        "cluster": tr("runs without one"),
    }
