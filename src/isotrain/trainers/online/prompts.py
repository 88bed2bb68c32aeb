"""The prompt stores of a recipe, as controller, engines and reward workers each open them."""

from __future__ import annotations

from collections.abc import Callable

from isotrain.data.prompts import PromptEncoder, PromptStore, cached_prompts
from isotrain.models.load import load_tokenizer, model_directory
from isotrain.recipe.schema import Recipe
from isotrain.trainers.setup import cache

TRAIN, VALIDATION = "train", "validation"


def open_prompts(recipe: Recipe, tell: Callable[[str], None] | None = None) -> dict[str, PromptStore]:
    """Training and, where the recipe has them, validation prompts; tokenised by whoever comes first."""
    data = recipe.data
    tokenizer = load_tokenizer(model_directory(recipe.model.path))
    encoder = PromptEncoder(tokenizer, data.prompt_key, data.max_length, data.too_long)
    sources = {TRAIN: data.train} | ({VALIDATION: data.validation} if data.validation else {})

    def opened(name: str) -> PromptStore:
        def report(rows: int) -> None:
            if tell is not None and rows % 10_000 == 0:
                tell(f"tokenising {sources[name]}: {rows:,} rows")

        return cached_prompts(sources[name], encoder, cache("tokens"), report)

    return {name: opened(name) for name in sources}
