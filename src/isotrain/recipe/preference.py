"""What the user writes for training on preference data: DPO and its kin, KTO, reward models."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from isotrain.recipe.section import OfflineSection

Kind = Literal["pairs", "responses", "steps"]
Reference = Literal["auto", "cached", "live", "adapters-off"]


class PreferenceSection(OfflineSection):
    """What all of them have in common."""

    kind: ClassVar[Kind]
    """What its data is."""
    items: ClassVar[str]
    """What people call them."""


class DpoSection(PreferenceSection):
    kind: ClassVar[Kind] = "pairs"
    items: ClassVar[str] = "pairs"

    name: Literal["dpo"]
    """Direct preference optimisation on pairs of a chosen and a rejected response."""
    loss: Literal["sigmoid", "ipo", "simpo", "orpo"] = "sigmoid"
    """The loss: DPO's own, or one of its kin; `simpo` and `orpo` have no reference."""
    beta: float | None = Field(default=None, gt=0)
    """Strength of the preference; by default 0.1, for `simpo` 2."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs thought to be the wrong way round, for `sigmoid` and `simpo`."""
    length_averaged: bool = False
    """Compare log-probs per token, for `sigmoid` and `ipo`; TRL's `ipo` does."""
    margin: float = Field(default=1.0, ge=0)
    """By how much the chosen response must be ahead, for `simpo`."""
    reference: Reference = "auto"
    """Where the reference is: log-probs computed once before training and kept in the cache, a second model,
    or the model without its adapters; `auto` is the last where there are adapters, else the first."""

    @model_validator(mode="after")
    def _only_what_the_loss_has(self) -> DpoSection:
        if self.label_smoothing and self.loss not in ("sigmoid", "simpo"):
            raise ValueError(f"label_smoothing is not for loss {self.loss}: leave it out")
        if self.length_averaged and self.loss not in ("sigmoid", "ipo"):
            raise ValueError(f"length_averaged is not for loss {self.loss}, which always or never does it")
        return self


class KtoSection(PreferenceSection):
    kind: ClassVar[Kind] = "responses"
    items: ClassVar[str] = "responses"

    name: Literal["kto"]
    """Kahneman-Tversky optimisation on responses that are each desirable or not."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the preference."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of desirable responses; with the counts of both kinds, weights times counts should be
    similar."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of the others."""
    reference: Reference = "auto"
    """Where the reference is: log-probs computed once before training and kept in the cache, a second model,
    or the model without its adapters; `auto` is the last where there are adapters, else the first."""


class RmSection(PreferenceSection):
    kind: ClassVar[Kind] = "pairs"
    items: ClassVar[str] = "pairs"

    name: Literal["rm"]
    """A reward model: one score for a response, learnt from pairs."""
    loss: Literal["sigmoid", "logexp"] = "sigmoid"
    """The same function in TRL's and in OpenRLHF's form; only `sigmoid` takes margins."""
    margins: bool = False
    """Use the rows' `margin`: by how much the chosen response should be ahead."""
    centre: float = Field(default=0.0, ge=0)
    """Coefficient that keeps scores around 0, which pairs alone leave open; 0.01 is usual."""

    @model_validator(mode="after")
    def _logexp_has_no_margin(self) -> RmSection:
        if self.margins and self.loss == "logexp":
            raise ValueError("margins need loss: sigmoid")
        return self


class PrmSection(PreferenceSection):
    kind: ClassVar[Kind] = "steps"
    items: ClassVar[str] = "solutions"

    name: Literal["prm"]
    """A process reward model: whether each step of a solution is right."""
    step_separator: str = "\n"
    """Written after each step; the verdict is read at its last token."""
    good_token: str = "+"
    """The token that stands for a right step; it must be one token of the model's."""
    bad_token: str = "-"
    """The token that stands for a wrong one."""
    vocabulary: Literal["restricted", "whole"] = "restricted"
    """Whether the two tokens are compared with each other alone, or with all others as well."""
    head: Literal["tokens", "classifier"] = "tokens"
    """What speaks: the language model with the two tokens, or a new head with two classes in its place."""

    @model_validator(mode="after")
    def _a_classifier_has_no_tokens(self) -> PrmSection:
        # Not what was written: a resolved recipe has every field.
        fields = type(self).model_fields
        names = ("good_token", "bad_token", "vocabulary")
        given = [name for name in names if getattr(self, name) != fields[name].default]
        if self.head == "classifier" and given:
            raise ValueError(f"{given[0]} is for head: tokens; leave it out")
        return self


Preference = DpoSection | KtoSection | RmSection | PrmSection
