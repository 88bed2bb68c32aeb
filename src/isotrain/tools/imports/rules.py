"""Tables of what becomes of each key of another framework."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, Literal

Kind = Literal["mapped", "no effect", "refused"]


@dataclass(frozen=True)
class ByVersion:
    """A default that differs between versions, oldest first."""

    values: tuple[Any, ...]


def by(*values: Any) -> ByVersion:
    return ByVersion(values)


NONE = object()
"""There is no default: the key must be given, or its absence means something of its own."""

Convert = Callable[[Any], Any]
_NAMES = re.compile(r"(?:\{[^{}]*\}|[^\s{}])+")


@dataclass(frozen=True)
class KeyRule:
    """`neutral` are the values of a refused key that do what isotrain does anyway.

    `together` marks a mapped key that is converted with others, by a function beside the table. `changes`
    says whether refusing the key changes the training, or only its speed, its place or what it logs.
    """

    key: str
    kind: Kind
    field: str = ""
    default: Any = NONE
    convert: Convert | None = None
    together: bool = False
    neutral: tuple[Any, ...] = ()
    why: str = ""
    changes: bool = True


def maps(key: str, field: str, default: Any = NONE, convert: Convert | None = None) -> KeyRule:
    """A key that is one field."""
    return KeyRule(key, "mapped", field, default, convert)


def part(key: str, field: str, default: Any = NONE) -> KeyRule:
    """A key that makes a field together with others."""
    return KeyRule(key, "mapped", field, default, together=True)


def no_effect(keys: Mapping[str, str]) -> Iterator[KeyRule]:
    """Rules of keys without effect here, from the reasons and the keys of each."""
    for why, names in keys.items():
        yield KeyRule(names, "no effect", why=why)


def refused(keys: Mapping[str, str], changes: bool = True) -> Iterator[KeyRule]:
    """Rules of keys that isotrain cannot follow, except with a neutral value: `key=1` or `key=1|2`."""
    for why, names in keys.items():
        for name in _NAMES.findall(names):
            key, _, values = name.partition("=")
            neutral = (None, *map(_value, values.split("|"))) if values else (None,)
            yield KeyRule(key, "refused", neutral=neutral, why=why, changes=changes)


def _value(text: str) -> bool | float | str:
    if text in ("True", "False"):
        return text == "True"
    return float(text) if re.fullmatch(r"-?[\d.]+", text) else text


class KeyTable:
    """The rules of a framework by key: an exact name goes before patterns, these go in their order.

    `short` has names that stand for the beginning of keys.
    """

    def __init__(self, *groups: Iterable[KeyRule], short: Mapping[str, str] | None = None) -> None:
        self.exact: dict[str, KeyRule] = {}
        self.patterns: list[KeyRule] = []
        for rule in (rule for group in groups for rule in group):
            for name in expanded(rule.key):
                first, dot, rest = name.partition(".")
                key = (short or {}).get(first, first) + dot + rest
                if "*" in key:
                    self.patterns.append(replace(rule, key=key))
                    continue
                assert key not in self.exact, f"{key} has two rules"
                self.exact[key] = replace(rule, key=key)

    def find(self, key: str) -> KeyRule | None:
        if key in self.exact:
            return self.exact[key]
        return next((rule for rule in self.patterns if fnmatchcase(key, rule.key)), None)


def expanded(names: str) -> list[str]:
    """The keys that names stand for: blanks are between them, and `a.{b,c}.d` is two; `*` is any text."""
    keys: list[str] = []
    for name in _NAMES.findall(names):
        parts = re.findall(r"\{[^{}]*\}|[^{}]+", name)
        choices = [re.split(r",\s*", part.strip("{}")) for part in parts]
        keys += ["".join(chosen) for chosen in product(*choices)]
    return keys


def default_of(rule: KeyRule, version: int) -> Any:
    """The default in the version with that number; `NONE` if there is none."""
    default = rule.default
    return default.values[version] if isinstance(default, ByVersion) else default
