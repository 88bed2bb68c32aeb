"""The prompt stores of a recipe, as controller, engines and reward workers each open them."""

from __future__ import annotations

from collections.abc import Callable

from isotrain.data.prompts import Prompt, PromptEncoder
from isotrain.data.store import SampleStore
from isotrain.data.tokenise import cached_store
from isotrain.models.load import load_tokenizer, model_directory
from isotrain.recipe.schema import Recipe
from isotrain.trainers.setup import cache

TRAIN, VALIDATION = "train", "validation"


def open_prompts(recipe: Recipe, tell: Callable[[str], None] | None = None) -> dict[str, SampleStore[Prompt]]:
    """Training and, where the recipe has them, validation prompts; tokenised by whoever comes first."""
    data = recipe.data
    tokenizer = load_tokenizer(model_directory(recipe.model.path))
    encoder = PromptEncoder(tokenizer, data.prompt_key, data.max_length, data.too_long)
    sources = {TRAIN: data.train} | ({VALIDATION: data.validation} if data.validation else {})
    return {name: cached_store(source, encoder, cache("tokens"), tell) for name, source in sources.items()}
