"""Tables of what becomes of each key of another framework, and how the values of keys are read.

`verl.yaml`, `openrlhf.yaml` and `trl.yaml` have the tables: under `mapped` a line per key with its field and
default (or `defaults`, one of each version), under the other headings the reasons with their keys. `read`
says how the value of a key that is one field is read; a key without it makes a field together with others, in
a function beside the tables. Names may have braces and stars: see `expanded`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from isotrain.recipe import document

_NAMES = re.compile(r"(?:\{[^{}]*\}|[^\s{}])+")


def as_whole(value: Any) -> int | None:
    number = as_number(value)
    return int(number) if number is not None and number == int(number) else None


def as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) < 2**53 else None


def as_flag(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower())


def whole(value: Any) -> int:
    number = as_whole(value)
    if number is None:
        raise ValueError(f"{value} is not a whole number")
    return number


def number(value: Any) -> float:
    result = as_number(value)
    if result is None:
        raise ValueError(f"{value} is not a number")
    return result


def flag(value: Any) -> bool:
    result = as_flag(value)
    if result is None:
        raise ValueError(f"{value} is neither true nor false")
    return result


def text(value: Any) -> str:
    if isinstance(value, dict | list):
        raise ValueError(f"{value} is not text")
    return str(value)


def texts(value: Any) -> str | list[str]:
    """One name, or a list of them."""
    if isinstance(value, list):
        names = [text(item) for item in value]
        return names[0] if len(names) == 1 else names
    return text(value)


READERS: dict[str, Callable[[Any], Any]] = {
    "whole": whole,
    "number": number,
    "flag": flag,
    "text": text,
    "texts": texts,
    "same": lambda value: value,
    # Steps between two events: -1 (never) is 0 here.
    "every": lambda value: max(0, whole(value)),
    # No limit is -1 here, and 0 or -1 there.
    "limit": lambda value: whole(value) or -1,
}

NONE = object()
"""There is no default: the key must be given, or its absence means something of its own."""


@dataclass(frozen=True)
class KeyRule:
    """Fate of one key, or of those that a pattern matches.

    `defaults` has one value of each version, oldest first, or one of all. `neutral` are the values of a
    refused key that do what isotrain does anyway. `changes` says whether refusing the key changes the
    training, or only its speed, its place or what it logs.
    """

    key: str
    kind: Literal["mapped", "no effect", "refused"]
    field: str = ""
    defaults: tuple[Any, ...] = ()
    read: Callable[[Any], Any] | None = None
    neutral: tuple[Any, ...] = ()
    why: str = ""
    changes: bool = True

    def default(self, version: int) -> Any:
        """The default in the version with that number; `NONE` if there is none."""
        return self.defaults[version if len(self.defaults) > 1 else 0] if self.defaults else NONE


class _MappedKey(BaseModel):
    model_config = ConfigDict(extra="forbid")

    field: str
    read: Literal["whole", "number", "flag", "text", "texts", "same", "every", "limit"] | None = None
    default: Any = NONE
    defaults: tuple[Any, ...] = ()


class _Table(BaseModel):
    """One table of a file; `short` has names for beginnings of keys, `flat` earlier names of keys."""

    model_config = ConfigDict(extra="forbid")

    versions: tuple[str, ...] = ()
    short: dict[str, str] = {}
    mapped: dict[str, _MappedKey] = {}
    refused: dict[str, str] = {}
    refused_settings: dict[str, str] = Field({}, alias="refused settings")
    no_effect: dict[str, str] = Field({}, alias="no effect")
    flat: dict[str, str] = {}

    def rules(self) -> Iterator[KeyRule]:
        for rule in self._short_rules():
            for name in expanded(rule.key):
                first, dot, rest = name.partition(".")
                yield replace(rule, key=self.short.get(first, first) + dot + rest)

    def _short_rules(self) -> Iterator[KeyRule]:
        for names, row in self.mapped.items():
            defaults = row.defaults if row.default is NONE else (row.default,)
            yield KeyRule(names, "mapped", row.field, defaults, READERS[row.read] if row.read else None)
        for changes, reasons in ((True, self.refused), (False, self.refused_settings)):
            for why, names in reasons.items():
                for name in _NAMES.findall(names):
                    key, _, values = name.partition("=")
                    neutral = (None, *map(_neutral, values.split("|"))) if values else (None,)
                    yield KeyRule(key, "refused", neutral=neutral, why=why, changes=changes)
        for why, names in self.no_effect.items():
            yield KeyRule(names, "no effect", why=why)


class KeyTable:
    """The rules of a trainer by key: an exact name goes before patterns, these go in their order."""

    def __init__(self, tables: Iterable[_Table]) -> None:
        self.versions: tuple[str, ...] = ()
        self.flat: dict[str, str] = {}
        self.exact: dict[str, KeyRule] = {}
        self.patterns: list[KeyRule] = []
        for table in tables:
            self.versions = self.versions or table.versions
            self.flat |= table.flat
            for rule in table.rules():
                if "*" in rule.key:
                    self.patterns.append(rule)
                    continue
                assert rule.key not in self.exact, f"{rule.key} has two rules"
                self.exact[rule.key] = rule

    def find(self, key: str) -> KeyRule | None:
        if key in self.exact:
            return self.exact[key]
        return next((rule for rule in self.patterns if fnmatchcase(key, rule.key)), None)


@cache
def key_table(framework: str, *names: str) -> KeyTable:
    """The tables with these names in the file of a framework, as one."""
    file = files("isotrain.tools.imports").joinpath(f"{framework}.yaml")
    parsed = document.parse(file.read_text(encoding="utf-8"), file.name)
    assert not parsed.problems, parsed.problems
    return KeyTable(_Table.model_validate(parsed.values[name]) for name in names)


def verl_ppo() -> KeyTable:
    return key_table("verl", "other_engines", "ppo", "ppo_rest")


def verl_sft() -> KeyTable:
    return key_table("verl", "sft")


def openrlhf_ppo() -> KeyTable:
    return key_table("openrlhf", "common", "ppo")


def openrlhf_offline() -> KeyTable:
    return key_table("openrlhf", "common", "offline")


def expanded(names: str) -> list[str]:
    """The keys that names stand for: blanks are between them, and `a.{b,c}.d` is two; `*` is any text."""
    keys: list[str] = []
    for name in _NAMES.findall(names):
        parts = re.findall(r"\{[^{}]*\}|[^{}]+", name)
        choices = [re.split(r",\s*", part.strip("{}")) for part in parts]
        keys += ["".join(chosen) for chosen in product(*choices)]
    return keys


def _neutral(text: str) -> bool | float | str:
    if text in ("True", "False"):
        return text == "True"
    return float(text) if re.fullmatch(r"-?[\d.]+", text) else text
