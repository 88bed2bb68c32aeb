"""The data of a run: tokenised once, cached, and dealt out to ranks, engines and reward workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from isotrain.data.chunks import RowEncoder
from isotrain.data.encode import Encoder
from isotrain.data.items import Item
from isotrain.data.loader import BatchLoader
from isotrain.data.preference_items import PreferenceEncoder
from isotrain.data.prompts import Prompt, PromptEncoder
from isotrain.data.sampler import Sampler
from isotrain.data.store import SampleStore
from isotrain.data.tokenise import cached_store
from isotrain.device.base import Device
from isotrain.engine.build import choose_attention
from isotrain.engine.world import World
from isotrain.models.backbone import shares_prompts
from isotrain.models.load import load_tokenizer, model_directory
from isotrain.observe.console import Console
from isotrain.recipe.preference import DpoSection, KtoSection, PreferenceSection, PrmSection, RmSection
from isotrain.recipe.schema import DataSection, Recipe

CACHE_VARIABLE = "ISOTRAIN_CACHE"


def open_loaders(
    recipe: Recipe, device: Device, world: World, console: Console
) -> tuple[BatchLoader, BatchLoader | None]:
    """Training and validation micro-batches; each data set is tokenised once and cached."""
    data = recipe.data
    train = _open_store(recipe, "train", data.train, world, console)
    limit = None if recipe.trainer.steps else len(train) * recipe.trainer.epochs
    loader = _loader(
        recipe, train, Sampler(len(train), data.batch_size, recipe.seed, data.shuffle, limit), device, world
    )
    if not data.validation:
        return loader, None
    validation = _open_store(recipe, "validation", data.validation, world, console)
    rows = min(len(validation), data.validation_rows or len(validation))
    in_order = Sampler(rows, data.batch_size, recipe.seed, shuffle=False, limit=rows)
    return loader, _loader(recipe, validation, in_order, device, world)


def _loader(
    recipe: Recipe, store: SampleStore[Item], sampler: Sampler, device: Device, world: World
) -> BatchLoader:
    data = recipe.data
    return BatchLoader(
        store,
        sampler,
        data.tokens_per_micro_batch,
        world.data_rank,
        world.data_ranks,
        share_prompts=_pairs_share_prompts(recipe, device),
        longest=data.max_length if isinstance(recipe.algorithm, KtoSection) else None,
    )


def _pairs_share_prompts(recipe: Recipe, device: Device) -> bool:
    """Whether both samples of a pair can store their prompt once."""
    if not isinstance(recipe.algorithm, DpoSection | RmSection):
        return False
    return shares_prompts(
        choose_attention(model_directory(recipe.model.path), recipe.model, device, recipe.device.mesh.context)
    )


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


def _open_store(
    recipe: Recipe, name: str, source: str | list[str], world: World, console: Console
) -> SampleStore[Item]:
    """The store of a source of rows, encoded as the algorithm learns from them."""
    data, algorithm = recipe.data, recipe.algorithm
    tokenizer = load_tokenizer(model_directory(recipe.model.path))
    encoder: RowEncoder[Item] = (
        preference_encoder(tokenizer, data, algorithm)
        if isinstance(algorithm, PreferenceSection)
        else Encoder(
            tokenizer, data.format, data.prompt_key, data.completion_key, data.max_length, data.too_long
        )
    )
    # One rank of a machine builds the store while its others wait; then all map the same files.
    return world.machine_first(
        f"data.{name}", lambda: cached_store(source, encoder, cache("tokens"), console.message)
    )


def cache(kind: str) -> Path:
    """Where things that were made from data sets are kept: `tokens`, `references`."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "isotrain") / kind


def total_steps(recipe: Recipe, rows: int) -> int:
    return recipe.trainer.steps or -(-rows * recipe.trainer.epochs // recipe.data.batch_size)


TRAIN, VALIDATION = "train", "validation"


def open_prompts(recipe: Recipe, tell: Callable[[str], None] | None = None) -> dict[str, SampleStore[Prompt]]:
    """Training and, where the recipe has them, validation prompts; tokenised by whoever comes first."""
    data = recipe.data
    tokenizer = load_tokenizer(model_directory(recipe.model.path))
    encoder = PromptEncoder(tokenizer, data.prompt_key, data.max_length, data.too_long)
    sources = {TRAIN: data.train} | ({VALIDATION: data.validation} if data.validation else {})
    return {name: cached_store(source, encoder, cache("tokens"), tell) for name, source in sources.items()}
