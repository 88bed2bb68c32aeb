"""The keys of a script, configuration or log of another framework, with values and lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from isotrain.errors import IsotrainError

LARGEST = 64 * 1024 * 1024
"""Bytes that are read of a source: logs are long."""
MOST_KEYS = 20_000

SECRET = "***"
_SECRET_NAME = re.compile(r"(?:^|[._-])(?:\w*key|\w*token|\w*secret|\w*password|passwd|credentials?)$", re.I)
_LONGEST_NAME = 100
_SECRET_VALUE = re.compile(r"(?:hf_|sk-|ghp_|glpat-)[\w-]{16,}|[0-9a-f]{40}|[0-9a-f]{64}", re.I)
_CREDENTIALS = re.compile(r"://[^/\s'\"@]*@")


class ImportSourceError(IsotrainError, ValueError):
    """A source that cannot be read, or in which no training was found; with what to give instead."""


@dataclass(frozen=True)
class Unknown:
    """A value that only running the script would tell; `text` has a question mark for what is missing.

    `head` is the text before the first part that is missing.
    """

    why: str
    text: str = "?"
    head: str = ""


def as_text(word: str | Unknown) -> str:
    return word.text if isinstance(word, Unknown) else word


@dataclass(frozen=True)
class ScriptCondition:
    """A condition of a script that is not known, and what each of its branches sets.

    `names` are the variables that decide it, or `if:LINE` if it is no question of variables.
    """

    line: int
    text: str
    names: tuple[str, ...]
    sets: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def report(self) -> list[str]:
        """Lines with the condition, what decides it, and what each branch sets."""
        decides = " ".join(
            f"--set {name}={'true' if name.startswith('if:') else 'VALUE'}" for name in self.names
        )
        branches = [f"  {branch}: {', '.join(sets) or 'nothing'}" for branch, sets in self.sets.items()]
        return [f"line {self.line}: {self.text} is not known; {decides} decides it", *branches]


@dataclass(frozen=True)
class KeySetting:
    """One value as it was given; `line` is 0 if there are no lines.

    `entries` are the numbers of the entries that gave it. `choices` are the values that conditions give it.
    """

    value: Any
    line: int = 0
    entries: frozenset[int] = frozenset()
    choices: tuple[str, ...] = ()


WordOutcome = Literal["mapped", "no effect", "refused", "unknown"]


@dataclass
class SourceEntry:
    """One word of a command, or one key of a configuration, and what becomes of it.

    An entry with keys ends as its keys do. One without has its outcome from where it was read.
    """

    text: str
    line: int
    keys: list[str] = field(default_factory=list)
    outcome: WordOutcome | None = None


@dataclass(frozen=True)
class Stray:
    """A word of a command whose effect is not known."""

    text: str
    why: str
    line: int


@dataclass
class ImportSource:
    """Everything that was found. `kind` is `script`, `overrides`, `config` or `log`.

    `expected` is the number of words or keys that went in, counted where they were read; `entries` is what
    was made of them. `opened` are words that may be any key, `settled` the keys that were given after them.
    """

    kind: str
    settings: dict[str, KeySetting] = field(default_factory=dict)
    entries: list[SourceEntry] = field(default_factory=list)
    expected: int = 0
    strays: list[Stray] = field(default_factory=list)
    settled: set[str] = field(default_factory=set)
    conditions: list[ScriptCondition] = field(default_factory=list)
    opened: list[Stray] = field(default_factory=list)
    program: str = ""
    launcher: dict[str, KeySetting] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    total_steps: int | None = None

    def enter(self, text: str, line: int = 0, outcome: WordOutcome | None = None) -> None:
        """Take a word or key into the account; `set` names its keys."""
        self.entries.append(SourceEntry(text, line, outcome=outcome))

    def set(
        self, key: str, value: Any, line: int = 0, when: str = "", entries: Iterable[int] | None = None
    ) -> None:
        """A value of the entry that was taken last, or of `entries`; `when` is the condition of it."""
        if len(self.settings) >= MOST_KEYS:
            raise ImportSourceError(f"more than {MOST_KEYS} keys; is this a configuration?")
        numbers = frozenset(range(len(self.entries))[-1:] if entries is None else entries)
        for number in numbers:
            self.entries[number].keys.append(key)
        before = self.settings.pop(key, None)
        choices: tuple[str, ...] = ()
        if when and not (before and type(before.value) is type(value) and before.value == value):
            choices, value = self._either(before, value, when)
        if before and (choices or before.value == value):
            numbers |= before.entries
        self.settings[key] = KeySetting(value, line, numbers, choices)
        self.settled.add(key)

    @staticmethod
    def _either(before: KeySetting | None, value: Any, when: str) -> tuple[tuple[str, ...], Unknown]:
        """A value that is given under a condition only."""
        choices = before.choices if before else ()
        if before and not choices:
            earlier = before.value.why if isinstance(before.value, Unknown) else before.value
            choices = (f"{without_secrets(earlier)} before",)
        shown = value.why if isinstance(value, Unknown) else without_secrets(value)
        choices = (*choices, f"{shown} {when}")
        rest = ", not given otherwise" if before is None else ""
        return choices, Unknown(f"it is {', '.join(choices)}{rest}")

    def stray(self, text: str, why: str, line: int, opens: bool = False) -> None:
        """The effect of the entry that was taken last is not known; with `opens` it may be any key."""
        self.strays.append(Stray(text, why, line))
        if self.entries:
            self.entries[-1].outcome = "unknown"
        if opens:
            self.opened.append(self.strays[-1])
            self.settled.clear()

    def certain(self, key: str) -> bool:
        """Whether no word that may be any key comes after the last that gave this one."""
        return key in self.settled or not self.opened


def secret_name(name: str) -> bool:
    """Whether a variable or key of this name may hold a credential."""
    return bool(_SECRET_NAME.search(name[-_LONGEST_NAME:]))  # quadratic in the length of the name


def holds_secret(name: str, value: str) -> bool:
    """The same, for a variable with a value: `INPUT_KEY=prompt` names a column."""
    harmless = re.fullmatch(r"[\d.]+|[A-Za-z_.]{1,15}", value) and not re.search("secret|passw", name, re.I)
    return bool(value) and secret_name(name) and not harmless


def without_secrets(value: Any) -> Any:
    """The value without what looks like a credential in it."""
    if isinstance(value, str):
        return SECRET if _SECRET_VALUE.fullmatch(value.strip()) else _CREDENTIALS.sub(f"://{SECRET}@", value)
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, dict):
        return {
            key: SECRET if secret_name(str(key)) else without_secrets(item) for key, item in value.items()
        }
    return value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; an empty section is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat
