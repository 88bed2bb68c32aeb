"""Recipe sections for training on preference data: DPO and its variants, KTO, reward models."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from isotrain.language import tr
from isotrain.recipe.section import OfflineSection

Kind = Literal["pairs", "responses", "steps"]
Reference = Literal["auto", "cached", "live", "adapters-off"]


class PreferenceSection(OfflineSection):
    """Fields that all of them share."""

    kind: ClassVar[Kind]
    """The kind of its data."""
    items: ClassVar[str]
    """The noun for them in messages."""


class DpoSection(PreferenceSection):
    kind: ClassVar[Kind] = "pairs"
    items: ClassVar[str] = "pairs"

    name: Literal["dpo"]
    """Direct preference optimisation on pairs of a chosen and a rejected response."""
    loss: Literal["sigmoid", "ipo", "simpo", "orpo"] = "sigmoid"
    """The loss: `sigmoid` is DPO's own; `simpo` and `orpo` need no reference model."""
    beta: float | None = Field(default=None, gt=0)
    """Weight of the preference term; by default 0.1, for `simpo` 2."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed fraction of pairs with swapped labels, for `sigmoid` and `simpo`."""
    length_averaged: bool = False
    """Average log-probs over tokens instead of summing them, for `sigmoid` and `ipo`; TRL's `ipo` does so."""
    margin: float = Field(default=1.0, ge=0)
    """Target reward margin between the chosen and the rejected response, for `simpo`."""
    reference: Reference = "auto"
    """Where reference log-probs come from: computed once before training and cached, a second model,
    or the model without its adapters. `auto` uses the last with LoRA, else the first."""

    @model_validator(mode="after")
    def _only_what_the_loss_has(self) -> DpoSection:
        if self.label_smoothing and self.loss not in ("sigmoid", "simpo"):
            raise ValueError(tr("label_smoothing cannot be used with loss {loss}: remove it", loss=self.loss))
        if self.length_averaged and self.loss not in ("sigmoid", "ipo"):
            raise ValueError(tr("length_averaged cannot be used with loss {loss}: remove it", loss=self.loss))
        return self


class KtoSection(PreferenceSection):
    kind: ClassVar[Kind] = "responses"
    items: ClassVar[str] = "responses"

    name: Literal["kto"]
    """Kahneman-Tversky optimisation on single responses labelled desirable or undesirable."""
    beta: float = Field(default=0.1, gt=0)
    """Weight of the preference term."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of desirable responses; weight times count should be similar for both kinds."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of undesirable responses."""
    reference: Reference = "auto"
    """Where reference log-probs come from: computed once before training and cached, a second model,
    or the model without its adapters. `auto` uses the last with LoRA, else the first."""

    @model_validator(mode="after")
    def _some_responses_count(self) -> KtoSection:
        if not self.desirable_weight and not self.undesirable_weight:
            raise ValueError(
                tr("desirable_weight and undesirable_weight are both 0, so nothing is learnt: raise one")
            )
        return self


class RmSection(PreferenceSection):
    kind: ClassVar[Kind] = "pairs"
    items: ClassVar[str] = "pairs"

    name: Literal["rm"]
    """A reward model: one score per response, learnt from pairs."""
    loss: Literal["sigmoid", "logexp"] = "sigmoid"
    """The same loss as TRL and as OpenRLHF write it; only `sigmoid` supports margins."""
    margins: bool = False
    """Use the `margin` column: how much higher the chosen response should score."""
    centre: float = Field(default=0.0, ge=0)
    """Coefficient of the term that centers scores at 0; 0.01 is usual."""

    @model_validator(mode="after")
    def _logexp_has_no_margin(self) -> RmSection:
        if self.margins and self.loss == "logexp":
            raise ValueError(tr("margins need loss: sigmoid: set it, or remove margins"))
        return self


class PrmSection(PreferenceSection):
    kind: ClassVar[Kind] = "steps"
    items: ClassVar[str] = "solutions"

    name: Literal["prm"]
    """A process reward model: scores whether each step of a solution is correct."""
    step_separator: str = "\n"
    """Text after each step; the score of the step is read at its last token."""
    good_token: str = "+"
    """The token for a correct step; it must be a single token of the tokenizer."""
    bad_token: str = "-"
    """The token for a wrong step; also a single token."""
    vocabulary: Literal["restricted", "whole"] = "restricted"
    """Normalize over the two label tokens only, or over the whole vocabulary."""
    head: Literal["tokens", "classifier"] = "tokens"
    """The language model's own head with the two tokens, or a new head with two classes."""

    @model_validator(mode="after")
    def _a_classifier_has_no_tokens(self) -> PrmSection:
        # Not what was written: a resolved recipe has every field.
        fields = type(self).model_fields
        names = ("good_token", "bad_token", "vocabulary")
        given = [name for name in names if getattr(self, name) != fields[name].default]
        if self.head == "classifier" and given:
            raise ValueError(tr("{name} needs head: tokens; remove it", name=given[0]))
        return self


Preference = DpoSection | KtoSection | RmSection | PrmSection
