"""Refuse what cannot train before torch is imported, which takes seconds, and before any process starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir

from isotrain import hub
from isotrain.data.formats import ColumnNames, detect, prompt_of
from isotrain.data.rows import first_row
from isotrain.device.vendors import check_host_ranks, check_kind, has_device_files
from isotrain.errors import DataError
from isotrain.models.files import model_directory
from isotrain.observe.run_directory import cannot_use
from isotrain.recipe.online import ClusterSection
from isotrain.recipe.preference import PreferenceSection
from isotrain.recipe.schema import Recipe


def first_look(recipe: Recipe) -> None:
    """What is wrong in the recipe, its first row of data or its model's path; what names alone say."""
    if find_spec("torch") is None:  # before data that nobody could train on
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    kind = recipe.device.type
    check_kind(kind)
    if _ranks_are_here(recipe) and (kind == "cpu" or (kind == "auto" and not has_device_files())):
        check_host_ranks(recipe.device.ranks)
    for field, source in _sources(recipe):
        try:
            row = first_row(source)
            if row is None:  # of a hub: the run downloads it
                continue
            if recipe.rollout is not None:
                prompt_of(row, recipe.data.prompt_key, has_template=True)
            elif not isinstance(recipe.algorithm, PreferenceSection) and recipe.data.format == "auto":
                detect(row, ColumnNames(recipe.data.prompt_key, recipe.data.completion_key))
        except DataError as error:
            raise DataError(f"{field}: {error}") from None
    path = recipe.model.path
    if Path(path).expanduser().exists() or path.partition("@")[0].count("/") > 1 or hub.is_offline():
        model_directory(path)  # nothing to download: no hub has a name like that, or none is asked
    _check_output(Path(recipe.output))


def _ranks_are_here(recipe: Recipe) -> bool:
    """Whether no other machine can have some: of torchrun, or of a Ray cluster that the run would join."""
    if recipe.rollout is None:
        return "RANK" not in os.environ
    address = (recipe.cluster or ClusterSection()).address
    begun = os.environ.get("RAY_ADDRESS") or (Path(gettempdir()) / "ray" / "ray_current_cluster").exists()
    return address == "local" or (address == "auto" and not begun)


def _sources(recipe: Recipe) -> Iterator[tuple[str, str | list[str]]]:
    yield "data.train", recipe.data.train
    if recipe.data.validation:
        yield "data.validation", recipe.data.validation


def _check_output(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_use(output, error) from error
