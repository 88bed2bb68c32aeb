"""What encoders are made from in a recipe, without torch: `isotrain preview` shows what they make."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from isotrain.data.encode import Encoder, PromptEncoder
from isotrain.data.preference import PreferenceEncoder
from isotrain.models.files import model_directory
from isotrain.recipe.data import DataSection
from isotrain.recipe.preference import PreferenceSection, PrmSection, RmSection
from isotrain.recipe.schema import Recipe

CACHE_VARIABLE = "ISOTRAIN_CACHE"


def preference_encoder(
    tokenizer: PreTrainedTokenizerBase, data: DataSection, algorithm: PreferenceSection
) -> PreferenceEncoder:
    separator = algorithm.step_separator if isinstance(algorithm, PrmSection) else ""
    margins = isinstance(algorithm, RmSection) and algorithm.margins
    return PreferenceEncoder(
        tokenizer,
        algorithm.kind,
        data.max_length,
        data.too_long,
        separator,
        margins=margins,
        scored=isinstance(algorithm, RmSection),
    )


def sample_encoder(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> Encoder:
    data = recipe.data
    return Encoder(
        tokenizer,
        data.format,
        data.prompt_key,
        data.completion_key,
        data.max_length,
        data.too_long,
        _picture_arguments(recipe),
    )


def prompt_encoder(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> PromptEncoder:
    data = recipe.data
    return PromptEncoder(
        tokenizer, data.prompt_key, data.max_length, data.too_long, _picture_arguments(recipe)
    )


def _picture_arguments(recipe: Recipe) -> dict[str, Any] | None:
    """What encoders need to know of pictures, if rows have some."""
    key, images = recipe.data.image_key, recipe.data.images
    if key is None:
        return None
    return {
        "model": str(model_directory(recipe.model.path)),
        "cache": str(cache("tokens") / "pictures"),
        "key": key,
        "max_per_prompt": images.max_per_prompt,
        "min_pixels": images.min_pixels,
        "max_pixels": images.max_pixels,
    }


def cache(kind: str) -> Path:
    """Where things that were made from data sets are kept: `tokens`, `references`."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "isotrain") / kind
