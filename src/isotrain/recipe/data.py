"""The data section of a recipe, and what pictures in it cannot be used with yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from isotrain.language import tr
from isotrain.recipe.online import OnlineSection
from isotrain.recipe.preference import PreferenceSection
from isotrain.recipe.section import Affects, Section

if TYPE_CHECKING:
    from isotrain.recipe.schema import Recipe


PICTURE_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types that can see here: one image processor, and positions of one kind."""


class ImagesSection(Section):
    max_per_prompt: int = Field(default=1, ge=1)
    """Most pictures of a row; one with more is an error."""
    min_pixels: int | None = Field(default=None, ge=1)
    """Smaller pictures are scaled up to so many pixels; by default the model's own limit."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Larger pictures are scaled down to so many pixels; by default the model's own limit."""

    @model_validator(mode="after")
    def _limits_are_ordered(self) -> ImagesSection:
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(
                tr(
                    "min_pixels ({least}) is above max_pixels ({most}): lower it",
                    least=self.min_pixels,
                    most=self.max_pixels,
                )
            )
        return self


class DataSection(Section):
    train: str | list[str]
    """Training rows: `.jsonl` or `.parquet` files, directories of them, or a Hub name (`name@revision`)."""
    validation: str | list[str] | None = None
    """Validation rows, in the same forms as `train`."""
    validation_rows: Annotated[int | None, Affects.COURSE] = Field(default=None, ge=1)
    """Validate on this many rows only, from the first on."""
    format: Literal["auto", "messages", "prompt-completion", "text", "sharegpt", "alpaca"] = "auto"
    """Row format; `auto` looks at the columns."""
    prompt_key: str = "prompt"
    """Column of the prompt; a dotted path such as `extra_info.question` reaches into structures."""
    completion_key: str = "completion"
    """Column of the completion; a dotted path as for `prompt_key`."""
    image_key: str | None = None
    """Column of the pictures of vision-language rows, such as `images`; the default reads none."""
    images: ImagesSection = ImagesSection()
    """How many pictures a row may have, and of what size; without effect without `image_key`."""
    max_length: int = Field(default=1024, ge=2)
    """Longest sample in tokens; for online algorithms, the longest prompt."""
    too_long: Literal["error", "truncate", "drop", "truncate-left", "truncate-middle"] = "error"
    """What to do with longer samples: stop with an error, truncate the end, or drop the sample. Prompts of
    online algorithms can be cut at the beginning or in the middle too."""
    batch_size: Annotated[int, Affects.RESPONSES] = Field(default=256, ge=1)
    """Samples per step, over all ranks; for online algorithms, prompts."""
    tokens_per_micro_batch: Annotated[int, Affects.PACKING] = Field(default=16384, ge=2)
    """Token budget of one packed micro-batch; must hold the longest sample. A micro-batch is on one device,
    or on `device.mesh.context` devices together."""
    shuffle: bool = True
    """Visit the rows in a new random order in each epoch."""

    @model_validator(mode="after")
    def _pictures_stay_whole(self) -> DataSection:
        if self.image_key and self.too_long.startswith("truncate"):
            raise ValueError(
                tr(
                    "too_long: {side} could cut a picture (image_key is {image_key}): use error or drop",
                    side=self.too_long,
                    image_key=self.image_key,
                )
            )
        return self

    @model_validator(mode="after")
    def _budget_holds_a_sample(self) -> DataSection:
        if self.tokens_per_micro_batch < self.max_length:
            raise ValueError(
                tr(
                    "tokens_per_micro_batch ({tokens_per_micro_batch}) is below max_length "
                    "({max_length}): raise it to at least {max_length}",
                    tokens_per_micro_batch=self.tokens_per_micro_batch,
                    max_length=self.max_length,
                )
            )
        return self


# Online algorithms whose ranks compute with the policy and its reference alone.
_WITH_PICTURES = ("grpo", "rloo", "reinforce++", "reinforce++-baseline")


def picture_rules(recipe: Recipe) -> Iterator[str]:
    """One line for each field that cannot be used with pictures yet, with what to write instead."""
    key, model, rollout = recipe.data.image_key, recipe.model, recipe.rollout
    if key is None:
        return
    mesh, name = recipe.device.mesh, recipe.algorithm.name
    if isinstance(recipe.algorithm, PreferenceSection):
        yield tr(
            "data.image_key ({key}) cannot be used with {name}: use sft, or remove it", key=key, name=name
        )
    if isinstance(recipe.algorithm, OnlineSection) and name not in _WITH_PICTURES:
        yield tr(
            "data.image_key ({key}) cannot be used with {name}: use one of {known}, or remove it",
            key=key,
            name=name,
            known=", ".join(_WITH_PICTURES),
        )
    for field in ("context", "expert"):
        if getattr(mesh, field) > 1:
            yield tr("data.image_key ({key}) needs device.mesh.{field}: 1", key=key, field=field)
    if model.compile:
        yield tr("data.image_key ({key}) cannot be used with model.compile: set it to false", key=key)
    if model.fused == "on":
        yield tr("data.image_key ({key}) cannot be used with model.fused on: set auto or off", key=key)
    if recipe.observe.truth:
        yield tr("data.image_key ({key}) cannot be used with observe.truth: remove one", key=key)
    if rollout is not None and recipe.reward is not None:
        yield from _online(recipe, key)


def _online(recipe: Recipe, key: str) -> Iterator[str]:
    rollout, reward = recipe.rollout, recipe.reward
    assert rollout is not None and reward is not None and isinstance(recipe.algorithm, OnlineSection)
    fields = {
        "rollout.engine ({engine})": rollout.engine == "sglang",
        "rollout.environment": rollout.environment is not None,
        "rollout.agent": rollout.agent is not None,
        "rollout.exact": rollout.exact,
        "reward.model": reward.model is not None,
        "reward.process": reward.process is not None,
        "algorithm.distillation": recipe.algorithm.distillation.path is not None,
    }
    for field in (field for field, used in fields.items() if used):
        yield tr(
            "data.image_key ({key}) cannot be used with {field} yet: {remedy}",
            key=key,
            field=field.format(engine=rollout.engine),
            remedy="set engine: hf" if "engine" in field else tr("remove one of the two"),
        )
