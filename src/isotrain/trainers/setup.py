"""From a recipe to the parts of a supervised run: configuration ends here."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from isotrain.data.encode import Encoder
from isotrain.data.feed import Feed
from isotrain.data.preference_items import PreferenceEncoder
from isotrain.data.preference_loader import PreferenceLoader
from isotrain.data.preference_store import PreferenceStore, cached_preferences
from isotrain.data.sampler import Sampler
from isotrain.data.store import TokenStore, cached_store
from isotrain.device.base import Device
from isotrain.device.determinism import Profile
from isotrain.engine.build import choose_attention
from isotrain.engine.world import World
from isotrain.errors import RecipeError
from isotrain.models.backbone import shares_prompts
from isotrain.models.load import load_tokenizer, model_directory
from isotrain.models.packed import PackedModel
from isotrain.models.scalar import ScalarModel
from isotrain.observe.console import Console
from isotrain.observe.environment import describe_environment
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.difference import MAY_CHANGE_ON_RESUME, difference, not_free
from isotrain.recipe.load import load_resolved, resolved
from isotrain.recipe.preference import DpoSection, KtoSection, PreferenceSection, PrmSection, RmSection
from isotrain.recipe.schema import DataSection, Recipe

CACHE_VARIABLE = "ISOTRAIN_CACHE"


def check_run(recipe: Recipe) -> None:
    """Refuse a run directory that this recipe cannot go on in."""
    run = RunDirectory(recipe.output)
    if run.resolved.is_file():
        _check_resumable(recipe, load_resolved(run.resolved))


def record_start(
    recipe: Recipe, source: str, device: Device, world: World, data: dict[str, str], determinism: Profile
) -> RunDirectory:
    """The run directory with this start in it; the leading rank writes it. `data` are digests."""
    check_same_data(recipe, data)
    world.barrier()  # all have checked the previous start before it is overwritten
    if world.leads:
        described = {
            "type": device.type,
            "name": device.name(),
            "ranks": world.size,
            "determinism": determinism.as_json(),
        }
        write_start(recipe, source, describe_environment(described, device.numerics_variables), data)
    world.barrier()
    return RunDirectory(recipe.output)


def write_start(
    recipe: Recipe, source: str, environment: Mapping[str, object], data: dict[str, str]
) -> RunDirectory:
    """The run directory with this start in it: on which device, with which versions, on which data."""
    return RunDirectory.create(recipe.output, source, resolved(recipe), {**environment, "data": data})


def describe_model(model: PackedModel | ScalarModel) -> dict[str, Any]:
    """How the model is computed, for `environment.json`: what `auto` has chosen."""
    return {"attention": model.attention, "fused": model.fused.operators, "unfused": model.fused.unknown}


def check_same_data(recipe: Recipe, data: Mapping[str, str]) -> None:
    """Refuse to go on with other data, or another reference model, than the run was started with."""
    if changed := changed_since_start(recipe, data):
        raise RecipeError(
            f"{', '.join(changed)}: has changed since the run in {recipe.output} was started; bring the old "
            "content back, or choose another output"
        )


def changed_since_start(recipe: Recipe, digests: Mapping[str, str]) -> list[str]:
    """The fields of those digests that were others when the run was last started."""
    starts = RunDirectory(recipe.output).starts()
    before = starts[-1].get("data", {}) if starts else {}
    return [digest_field(name) for name, digest in digests.items() if before.get(name, digest) != digest]


def digest_field(name: str) -> str:
    """The recipe's field that a digest is about; others are named after their sections."""
    return f"data.{name}" if name in ("train", "validation") else f"{name}.path"


def _check_resumable(recipe: Recipe, previous: Recipe) -> None:
    if recipe.trainer.resume == "never":
        raise RecipeError(
            f"output: {recipe.output} holds a run already; choose another output, or set trainer.resume=auto"
        )
    changed = not_free(difference(previous, recipe), MAY_CHANGE_ON_RESUME)
    if changed:
        listing = "\n  ".join(changed)
        raise RecipeError(
            f"output: {recipe.output} holds a run of another recipe, which cannot be resumed with this one:\n"
            f"  {listing}\nchoose another output, or change these back"
        )


@contextmanager
def run_lock(output: Path, leads: bool) -> Iterator[None]:
    """Refuses a second job in the same run directory; the system frees the lock however a job ends."""
    if not leads:
        yield
        return
    output.mkdir(parents=True, exist_ok=True)
    with open(output / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RecipeError(
                f"output: another process is training in {output}; wait for it or choose another"
            ) from error
        yield


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
