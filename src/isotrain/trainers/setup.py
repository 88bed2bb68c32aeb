"""The data of a supervised run: tokenised once, cached, and dealt out to the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from isotrain.data.encode import Encoder
from isotrain.data.feed import Feed
from isotrain.data.preference_items import PreferenceEncoder
from isotrain.data.preference_loader import PreferenceLoader
from isotrain.data.preference_store import PreferenceStore, cached_preferences
from isotrain.data.sampler import Sampler
from isotrain.data.store import TokenStore, cached_store
from isotrain.device.base import Device
from isotrain.engine.build import choose_attention
from isotrain.engine.world import World
from isotrain.models.backbone import shares_prompts
from isotrain.models.load import load_tokenizer, model_directory
from isotrain.observe.console import Console
from isotrain.recipe.preference import DpoSection, KtoSection, PreferenceSection, PrmSection, RmSection
from isotrain.recipe.schema import DataSection, Recipe

CACHE_VARIABLE = "ISOTRAIN_CACHE"


def open_feeds(
    recipe: Recipe, device: Device, world: World, console: Console
) -> tuple[Feed | PreferenceLoader, Feed | PreferenceLoader | None]:
    """Training and validation micro-batches; each data set is tokenised once and cached."""
    data = recipe.data
    opened = _store_opener(recipe, world, console)
    train = opened(data.train)
    limit = None if recipe.trainer.steps else len(train) * recipe.trainer.epochs
    sampler = Sampler(len(train), data.batch_size, recipe.seed, data.shuffle, limit)
    share_prompts = _pairs_share_prompts(recipe, device)
    feed = _feed(recipe, train, sampler, share_prompts, world)
    if not data.validation:
        return feed, None
    validation = opened(data.validation)
    rows = min(len(validation), data.validation_rows or len(validation))
    in_order = Sampler(rows, data.batch_size, recipe.seed, shuffle=False, limit=rows)
    return feed, _feed(recipe, validation, in_order, share_prompts, world)


def _feed(
    recipe: Recipe, store: TokenStore | PreferenceStore, sampler: Sampler, share_prompts: bool, world: World
) -> Feed | PreferenceLoader:
    data, algorithm = recipe.data, recipe.algorithm
    if isinstance(store, TokenStore):
        return Feed(store, sampler, data.tokens_per_micro_batch, world.rank, world.size)
    return PreferenceLoader(
        store,
        sampler,
        data.tokens_per_micro_batch,
        world.rank,
        world.size,
        share_prompts=share_prompts,
        longest=data.max_length if isinstance(algorithm, KtoSection) else None,
    )


def _pairs_share_prompts(recipe: Recipe, device: Device) -> bool:
    """Whether both samples of a pair can store their prompt once."""
    if not isinstance(recipe.algorithm, DpoSection | RmSection):
        return False
    return shares_prompts(choose_attention(model_directory(recipe.model.path), recipe.model, device))


def preference_encoder(
    tokenizer: PreTrainedTokenizerBase, data: DataSection, algorithm: PreferenceSection
) -> PreferenceEncoder:
    separator = algorithm.step_separator if isinstance(algorithm, PrmSection) else ""
    return PreferenceEncoder(tokenizer, algorithm.kind, data.max_length, data.too_long, separator)


def _store_opener(
    recipe: Recipe, world: World, console: Console
) -> Callable[[str | list[str]], TokenStore | PreferenceStore]:
    """From a source of rows to its store, of the kind that the algorithm learns from."""
    data, algorithm = recipe.data, recipe.algorithm
    tokenizer = load_tokenizer(model_directory(recipe.model.path))
    cached: Callable[..., TokenStore | PreferenceStore]
    if isinstance(algorithm, PreferenceSection):
        cached = partial(cached_preferences, encoder=preference_encoder(tokenizer, data, algorithm))
    else:
        encoder = Encoder(
            tokenizer, data.format, data.prompt_key, data.completion_key, data.max_length, data.too_long
        )
        cached = partial(cached_store, encode=encoder)

    def opened(source: str | list[str]) -> TokenStore | PreferenceStore:
        def report(rows: int) -> None:
            if rows % 10000 == 0:
                console.message(f"tokenising {source}: {rows:,} rows")

        # One rank of a machine builds the store while its others wait; then all map the same files.
        store = cached(source, root=cache("tokens"), progress=report) if world.local_rank == 0 else None
        world.barrier()
        return store or cached(source, root=cache("tokens"))

    return opened


def cache(kind: str) -> Path:
    """Where things that were made from data sets are kept: `tokens`, `references`."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "isotrain") / kind


def total_steps(recipe: Recipe, rows: int) -> int:
    return recipe.trainer.steps or -(-rows * recipe.trainer.epochs // recipe.data.batch_size)
