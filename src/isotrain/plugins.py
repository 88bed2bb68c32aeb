"""Rewards, advantages and policy losses of installed packages, by the names of their entry points."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from isotrain.errors import RecipeError

REWARDS, ADVANTAGES, POLICY_LOSSES = "isotrain.rewards", "isotrain.advantages", "isotrain.policy_losses"


@dataclass(frozen=True)
class Plugin:
    """An entry point that a recipe names in `field`."""

    field: str
    entry: EntryPoint

    @property
    def package(self) -> str:
        """Name and version of what brought it: `my-rewards 1.2`."""
        return f"{self.entry.dist.name} {self.entry.dist.version}" if self.entry.dist else "no package"

    def load(self) -> Any:
        """Import it: from here on, the package's code runs."""
        try:
            return self.entry.load()
        except Exception as error:
            raise self.wrong(f"cannot be loaded: {type(error).__name__}: {error}") from error

    def check_options(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        """`options` must be keyword arguments that the function takes."""
        try:
            inspect.signature(function).bind_partial(**options)
        except TypeError as error:
            raise self.wrong(f"does not take these options: {error}") from None

    def wrong(self, what: str) -> RecipeError:
        return RecipeError(f"{self.field}: {self.entry.name} of {self.package} ({self.entry.value}) {what}")


def find_plugin(group: str, name: str, field: str, ours: Mapping[str, str] | None = None) -> Plugin:
    """The one entry point of that name; `ours` are isotrain's own names, with what to write for them."""
    ours = ours or {}
    if name in ours:
        raise RecipeError(f"{field}: {name!r} is built in: write {ours[name]} instead of a plugin")
    installed = entry_points(group=group)
    by_package = {
        plugin.package: plugin for plugin in (Plugin(field, e) for e in installed.select(name=name))
    }
    if len(by_package) > 1:
        raise RecipeError(
            f"{field}: {' and '.join(sorted(by_package))} both have {name!r}; uninstall one of them"
        )
    if by_package:
        return next(iter(by_package.values()))
    known = [*sorted(installed.names), *(f"{written} (built in)" for written in ours.values())]
    near = get_close_matches(name, known, n=len(known) or 1)
    listed = ", ".join(dict.fromkeys([*near, *known])) or "none"
    raise RecipeError(f"{field}: no installed package has {name!r} in its {group}; available: {listed}")


def plugin_packages() -> set[str]:
    """Names of the installed packages that bring plugins."""
    groups = (entry_points(group=group) for group in (REWARDS, ADVANTAGES, POLICY_LOSSES))
    return {entry.dist.name for entries in groups for entry in entries if entry.dist}
