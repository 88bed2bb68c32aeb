"""The base of every part of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    needs: ClassVar[Mapping[str, str]] = {}
    """Top-level sections that must be there with this one: what for, and what to write."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Top-level sections that must not be there with this one, and why."""


class OfflineSection(Section):
    """An algorithm that learns from what is in its data."""

    refuses: ClassVar[Mapping[str, str]] = {
        "rollout": "samples no answers",
        "reward": "scores no answers",
        "cluster": "runs without one",
    }
