"""What becomes of one key of another framework: a line of a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

Kind = Literal["mapped", "no effect", "refused"]


@dataclass(frozen=True)
class ByVersion:
    """A default that differs between versions, oldest first."""

    values: tuple[Any, ...]


NONE = object()
"""There is no default: the key must be given, or its absence means something of its own."""

Convert = Callable[[Any], Any]


@dataclass(frozen=True)
class Rule:
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


def maps(key: str, field: str, default: Any = NONE, convert: Convert | None = None) -> Rule:
    """A key that is one field."""
    return Rule(key, "mapped", field, default, convert)


def part(key: str, field: str, default: Any = NONE) -> Rule:
    """A key that makes a field together with others."""
    return Rule(key, "mapped", field, default, together=True)


def drops(key: str, why: str, default: Any = NONE) -> Rule:
    """A key without effect here."""
    return Rule(key, "no effect", default=default, why=why)


def refuses(key: str, *neutral: Any, why: str, changes: bool = True) -> Rule:
    """A key that isotrain cannot follow, except with a neutral value."""
    return Rule(key, "refused", neutral=(None, *neutral), why=why, changes=changes)


class Table:
    """The rules of a framework by key; `a.{b,c}.d` in a rule names two keys, `*` any text."""

    def __init__(self, *groups: Iterable[Rule]) -> None:
        self.exact: dict[str, Rule] = {}
        self.patterns: list[Rule] = []
        for rule in (rule for group in groups for rule in group):
            for key in expanded(rule.key):
                if "*" in key:
                    self.patterns.append(replace(rule, key=key))
                    continue
                assert key not in self.exact, f"{key} has two rules"
                self.exact[key] = replace(rule, key=key)

    def find(self, key: str) -> Rule | None:
        if key in self.exact:
            return self.exact[key]
        return next((rule for rule in self.patterns if fnmatchcase(key, rule.key)), None)


def expanded(key: str) -> list[str]:
    """The keys that a name with braces stands for."""
    found = re.search(r"\{([^{}]*)\}", key)
    if not found:
        return [key]
    heads = [key[: found.start()] + choice + key[found.end() :] for choice in found[1].split(",")]
    return [name for head in heads for name in expanded(head)]


def default_of(rule: Rule, version: int) -> Any:
    """The default in the version with that number; `NONE` if there is none."""
    default = rule.default
    return default.values[version] if isinstance(default, ByVersion) else default
