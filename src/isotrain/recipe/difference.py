"""Differences between two recipes, and which of them make it another training."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from isotrain.recipe.document import as_written
from isotrain.recipe.fields import SectionType, leaves
from isotrain.recipe.load import resolved
from isotrain.recipe.schema import Recipe
from isotrain.recipe.section import Affects

_ABSENT = object()


def names_where(holds: Callable[[Affects], bool], model: SectionType = Recipe) -> frozenset[str]:
    """Fields for which this holds in all variants, and sections for which it holds throughout."""
    throughout: dict[str, bool] = {}
    for leaf in leaves(model):
        parts = leaf.path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            throughout[name] = throughout.get(name, True) and holds(leaf.affects)
    return frozenset(name for name, whole in throughout.items() if whole)


MAY_CHANGE_ON_RESUME = names_where(lambda affects: affects.may_change_on_resume)
MAY_DIFFER_IN_PARITY = names_where(lambda affects: affects.may_differ_in_parity)
FIXED_BY_RECORDING = tuple(dict.fromkeys(f.path for f in leaves(Recipe) if f.affects.fixed_by_recording))


def not_free(lines: Sequence[str], free: Collection[str]) -> list[str]:
    """Lines of `changes` about fields that are neither in `free` nor below one of them."""
    kept = []
    for line in lines:
        name = line.partition(":")[0]
        if not any(name == other or name.startswith(f"{other}.") for other in free):
            kept.append(line)
    return kept


def difference(a: Recipe, b: Recipe) -> list[str]:
    """Changes from `a` to `b`, one dotted field each: `optimizer.lr: 1e-05 -> 0.0001`."""
    return changes(resolved(a), resolved(b))


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The same for plain values: resolved recipes of any version, environments."""
    return list(_changes(before, after, ""))


def version_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """`changes` of resolved recipes: a field that one version did not have yet had its default's meaning.

    A section that one version did not have is null in the other where that one does not use it."""
    meaningless = set()
    for leaf in leaves(Recipe):
        parts = leaf.path.split(".")
        for section in (".".join(parts[:depth]) for depth in range(1, len(parts))):
            meaningless |= {f"{section}: (absent) -> null", f"{section}: null -> (absent)"}
        default = leaf.info.get_default(call_default_factory=True)
        if default is None or default == {} or isinstance(default, bool | int | float | str):
            shown = _shown(default)
            meaningless |= {f"{leaf.path}: (absent) -> {shown}", f"{leaf.path}: {shown} -> (absent)"}
    return [line for line in changes(before, after) if line not in meaningless]


def _changes(before: dict[str, Any], after: dict[str, Any], prefix: str) -> Iterator[str]:
    """A section that only one side has is one line, as it stands there."""
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "(absent)"
    # Text that a recipe would have to quote is quoted here too: 'null' is not null.
    if isinstance(value, str) and as_written(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
