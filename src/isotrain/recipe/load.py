"""Load a YAML file and overrides as a checked recipe, or report all its problems at once."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isotrain.errors import RecipeError
from isotrain.files import open_regular, parse_json
from isotrain.language import listed, tr
from isotrain.recipe import document as documents
from isotrain.recipe.check import check
from isotrain.recipe.document import (
    Document,
    Problem,
    SourcePlace,
    error_at,
    read_source,
    without_place,
)
from isotrain.recipe.fields import section_paths
from isotrain.recipe.schema import Recipe

_SHOWN_PROBLEMS = 50


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, apply `key=value` overrides, and check the result."""
    return parse_recipe(read_source(path), str(path), overrides)


def parse_recipe(text: str, source: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in `text`; `source` is its name in messages."""
    document = documents.parse(text, source)
    if document.values is None:
        empty = tr("the recipe is empty; `isotrain recipes tiny-sft` prints one")
        raise error_at(f"{source}:1:1", empty)
    if not isinstance(document.values, dict):
        kind = tr("a list") if isinstance(document.values, list) else tr("a single value")
        where = document.places[()].label
        wrong = tr("the file is {kind}; a recipe has 'key: value' lines", kind=kind)
        raise error_at(f"{where}:1", wrong)
    for number, override in enumerate(overrides):
        _apply(document, override, number)
    return _checked(document)


def other_run(output: Path | str) -> list[str]:
    """Overrides of a recipe that make it another run: its checkpoints do not replace those of the first."""
    return [path_override("output", output), "trainer.checkpoint_storage=null"]


def path_override(field: str, path: Path | str) -> str:
    """`field=path` as an override that no parser takes for anything but text."""
    return f"{field}={json.dumps(str(path), ensure_ascii=False)}"


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Every field, defaults included, as plain JSON values in the order of the schema."""
    return recipe.model_dump(mode="json")


def write_resolved(recipe: Recipe, path: Path) -> None:
    """Write `resolved` as JSON; the file appears whole or not at all."""
    text = json.dumps(resolved(recipe), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def load_resolved(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read back what `write_resolved` wrote, apply overrides, and check it like any recipe."""
    # JSON spells a long list of data files out over more bytes than the YAML it came from.
    text = read_source(path, longest=16 * documents.MAX_CHARACTERS, opened=open_regular)
    try:
        values = parse_json(text, constants=_refuse_constant)
    except ValueError as error:
        raise error_at(str(path), tr("not a resolved recipe: {error}", error=error)) from None
    if not isinstance(values, dict):
        raise error_at(str(path), tr("not a resolved recipe: expected a JSON object"))
    return check_values(values, str(path), overrides)


def check_values(values: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of plain values, which are changed; `source` is its name in messages."""
    document = Document(source, values)
    for number, override in enumerate(overrides):
        _apply(document, override, number)
    return _checked(document)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _checked(document: Document) -> Recipe:
    recipe = check(document, Recipe)
    if recipe is not None:
        return recipe
    problems = sorted(document.problems, key=lambda problem: problem.place.order)
    lines = [problem.words for problem in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > len(lines):
        lines.append(tr("... and {count} more problems", count=len(problems) - len(lines)))
    raise RecipeError(listed(lines, "\n"))


def _apply(document: Document, override: str, number: int) -> None:
    """Put the value of one `a.b=c` in its place; later overrides win."""
    key, equals, text = override.partition("=")
    # A URL that is refused because of the password in it must not be printed.
    shown = f"{key}=***" if "checkpoint_storage" in override else override
    label = tr("override {override!r}", override=shown)
    place = SourcePlace((1, number, 0), label)
    parts = key.strip().split(".")
    if not equals or not all(parts) or key.startswith(("+", "-", "~")):
        text = tr("expected key=value, for example optimizer.lr=1e-4")
        document.problems.append(Problem(place, text))
        return
    try:
        value = documents.parse(text, label, number, root=tuple(parts))
    except RecipeError as error:
        document.problems.append(Problem(place, without_place(error)))
        return
    if value.values is None and not value.spelling.get(tuple(parts)):
        text = tr("nothing after '='; write {key}=null for no value, or {key}='\"\"' for empty text", key=key)
        if key.strip() in section_paths(Recipe):
            text = tr("nothing after '='; write '{key}={{}}' for all defaults", key=key)
        document.problems.append(Problem(place, text))
        return
    _put(document, parts, value, place)


def _put(document: Document, parts: list[str], value: Document, place: SourcePlace) -> None:
    path = tuple(parts)
    inside = document.values
    for depth, part in enumerate(parts[:-1], start=1):
        if inside.get(part) is None:
            inside[part] = {}
            document.places.setdefault(path[:depth], place)
        inside = inside[part]
        if not isinstance(inside, dict):
            text = tr("{name!r} holds a value, not a section", name=documents.dotted(path[:depth]))
            document.problems.append(Problem(place, text))
            return
    document.forget(path)
    inside[parts[-1]] = value.values
    document.places.update(value.places)
    document.places[path] = place
    document.spelling.update(value.spelling)
    document.problems.extend(value.problems)
    document.rejected.update(value.rejected)
