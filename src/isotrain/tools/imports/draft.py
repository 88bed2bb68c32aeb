"""A recipe in the making: its fields with the keys they came from, and what could not be taken over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from isotrain.recipe.fields import leaves
from isotrain.recipe.schema import Recipe
from isotrain.recipe.section import Affects
from isotrain.tools.imports.hydra import resolve, shown
from isotrain.tools.imports.keys import NONE, KeyRule, KeyTable, as_flag, as_number, as_whole, expanded
from isotrain.tools.imports.source import (
    SECRET,
    ImportSource,
    KeySetting,
    Unknown,
    WordOutcome,
    secret_name,
    without_secrets,
)


@dataclass(frozen=True)
class RecipeLine:
    """A field of the recipe: its value, and the comment behind it."""

    value: Any
    comment: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeyFinding:
    """A key that is not in the recipe, or only in part."""

    key: str
    why: str
    line: int = 0
    changes: bool = False


Off = tuple[bool, str, str]
"""Whether keys have no effect, the beginnings of their names, and the reason."""


@dataclass
class Draft:
    """Reads keys by name, given or default, and collects what becomes of them."""

    source: ImportSource
    table: KeyTable
    framework: str
    version: str
    rows: int | None = None
    lines: dict[str, RecipeLine] = field(default_factory=dict)
    mapped: list[str] = field(default_factory=list)
    no_effect: list[KeyFinding] = field(default_factory=list)
    refused: list[KeyFinding] = field(default_factory=list)
    unknown: list[KeyFinding] = field(default_factory=list)
    questions: list[KeyFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, WordOutcome] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    nullable: frozenset[str] = frozenset()
    renamed: dict[str, str] = field(default_factory=dict)

    def given(self, key: str) -> bool:
        """Whether the source has a value for the key that is known."""
        return key in self.source.settings and not isinstance(self.raw(key), Unknown)

    def raw(self, key: str) -> Any:
        setting = self.source.settings.get(key)
        return setting.value if setting is not None else None

    def value(self, key: str, otherwise: Any = None) -> Any:
        """The value that the training uses: the one given, or else the default of its version."""
        rule = self.table.find(key)
        setting = self.source.settings.get(key)
        default = self._default(rule)
        default = otherwise if default is NONE else default
        self.used.add(key)
        value = resolve(setting.value if setting is not None else default, self._lookup)
        if setting is None:
            return value
        if isinstance(value, Unknown):
            instead = "set it" if default in (None, "") else f"{shown(str(default), 40)} is written"
            self.ask(key, f"{value.why}; {instead}", _matters(rule))
            return resolve(default, self._lookup)
        return without_secrets(value)

    def _default(self, rule: KeyRule | None) -> Any:
        return rule.default(self.table.versions.index(self.version)) if rule else NONE

    def _lookup(self, key: str) -> Any:
        if key in self.source.settings:
            return self.source.settings[key].value
        default = self._default(self.table.exact.get(key))
        return None if default is NONE else default

    def whole(self, key: str, otherwise: int | None = None, least: int | None = None) -> int | None:
        """A whole number, or `otherwise` with a finding if the value is none."""
        value = self.value(key, otherwise)
        number = as_whole(value)
        if number is None and value is not None:
            self.refuse(key, f"{shown(str(value), 40)} is not a whole number: set the field yourself")
            return otherwise
        if number is None or least is None or number >= least:
            return otherwise if number is None else number
        rule = self.table.find(key)
        if self.given(key) and not _same(value, self._default(rule)):
            self.refuse(key, f"{number} is below {least}: set the field yourself", _matters(rule))
        return otherwise

    def number(self, key: str, otherwise: float | None = None) -> float | None:
        value = self.value(key, otherwise)
        result = as_number(value)
        if result is None and value is not None:
            self.refuse(key, f"{shown(str(value), 40)} is not a number: set the field yourself")
            return otherwise
        return result

    def flag(self, key: str) -> bool:
        value = self.value(key)
        if as_flag(value) is None and value not in (None, ""):
            self.refuse(key, f"{shown(str(value), 40)} is neither true nor false: set the field yourself")
        return as_flag(value) is True

    def text(self, key: str, otherwise: str = "") -> str:
        value = self.value(key, otherwise)
        if isinstance(value, list | dict):
            self.refuse(key, f"{shown(str(value), 40)} is not one text: set the field yourself")
            return otherwise
        return otherwise if value is None else str(value)

    def partly(self, key: str, otherwise: str) -> str:
        """Text of which a part may be unknown, such as a date in a name: the rest of it."""
        raw = self.raw(key)
        if isinstance(raw, Unknown) and (rest := raw.text.replace("?", "").strip("-_ ")):
            self.used.add(key)
            self.ask(key, f"{raw.why}; this part is left out", changes=False)
            return rest
        return self.text(key, otherwise)

    def written(self, path: str, otherwise: Any) -> Any:
        """The value of a field that is written already."""
        return self.lines[path].value if path in self.lines else otherwise

    def launched(self, name: str) -> int | None:
        """A number that torchrun or deepspeed got; it is a question if it is not known."""
        setting = self.source.launcher.get(name)
        if setting is None:
            return None
        if isinstance(setting.value, Unknown):
            question = f"{setting.value.why}: set device.ranks to the number of devices"
            self.questions.append(KeyFinding(f"--{name}", question, setting.line))
        return as_whole(setting.value)

    def put(self, path: str, value: Any, *keys: str, note: str = "") -> None:
        """Write a field; the comment names the keys that were given, or whose default it is."""
        given = [self.aliases.get(key, key) for key in keys if self.given(key)]
        names = ", ".join(given)
        if keys and not given:
            names = f"default of {self.aliases.get(keys[0], keys[0])}"
        open_words = self.source.opened
        if keys and open_words and not all(self.source.certain(key) for key in given or keys[:1]):
            note = ", ".join(text for text in (note, f"NOT KNOWN: {open_words[-1].text} may set it") if text)
        comment = ": ".join(text for text in (names, note) if text)
        self.used.update(keys)
        self.lines[path] = RecipeLine(value, comment, keys)

    def refuse(self, key: str, why: str, changes: bool = True) -> None:
        setting = self.source.settings.get(key)
        finding = KeyFinding(self.aliases.get(key, key), why, setting.line if setting else 0, changes)
        if finding not in self.refused:
            self.refused.append(finding)

    def ask(self, key: str, question: str, changes: bool = True) -> None:
        setting = self.source.settings.get(key)
        name = self.aliases.get(key, key)
        if all(item.key != name for item in self.questions):
            self.questions.append(KeyFinding(name, question, setting.line if setting else 0, changes))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def sort_keys(self, off: Iterable[Off] = ()) -> None:
        """Put every key that was given under mapped, no effect, refused or unknown.

        `off` has the keys that have no effect in this training.
        """
        unused = [(tuple(expanded(names)), why) for holds, names, why in off if holds]
        for key, setting in self.source.settings.items():
            name, rule = self.aliases.get(key, key), self.table.find(key)
            reason = next((why for names, why in unused if key.startswith(names)), None)
            if rule is None and reason is None:
                why = f"value {_safe(name, setting.value)}"
                self.unknown.append(KeyFinding(shown(name), why, setting.line, True))
                self.outcomes[key] = "unknown"
            elif reason is not None or (rule is not None and rule.kind == "no effect"):
                why = reason or (rule.why if rule else "")
                self.no_effect.append(KeyFinding(name, why, setting.line))
                self.outcomes[key] = "no effect"
            else:
                assert rule is not None
                self.outcomes[key] = self._sorted(rule, key, name, setting)
                if self.outcomes[key] == "mapped":
                    self.mapped.append(name)
        for stray in self.source.strays:
            self.unknown.append(KeyFinding(stray.text, stray.why, stray.line, True))

    def _sorted(self, rule: KeyRule, key: str, name: str, setting: KeySetting) -> WordOutcome:
        """The outcome of a key with a rule that maps or refuses it."""
        if rule.kind == "refused":
            value = self.value(key)
            if any(item.key == name for item in self.questions):
                return "unknown"
            if any(_same(value, neutral) for neutral in (*rule.neutral, {}, [], "")):
                self.no_effect.append(KeyFinding(name, "the value is what isotrain does", setting.line))
                return "no effect"
            if not any(item.key == name for item in self.refused):
                self.refuse(key, rule.why, rule.changes)
            return "refused"
        if isinstance(resolve(setting.value, self._lookup), Unknown):
            self.value(key)  # asks
            return "unknown"
        if any(item.key == name for item in self.refused):
            return "refused"
        default = self._default(rule)
        if setting.value is None and default not in (NONE, None) and key not in self.nullable:
            self.refuse(key, f"null: {self.framework} has another default, and isotrain no such value")
            return "refused"
        if key in self.used:
            return "mapped"
        if setting.value is None or _same(setting.value, default):
            self.no_effect.append(KeyFinding(name, "its default, which nothing here uses", setting.line))
            return "no effect"
        why = f"nothing here uses it: check what {rule.field} is"
        self.unknown.append(KeyFinding(name, why, setting.line, True))
        return "unknown"

    def simple(self) -> None:
        """Write all fields that are one key each."""
        for rule in self.table.exact.values():
            if rule.read is None or (value := self.value(rule.key)) is None:
                continue
            try:
                value = rule.read(value)
            except (ValueError, TypeError, OverflowError) as error:
                self.refuse(rule.key, f"{shown(str(error))}: set {rule.field} yourself")
                continue
            if value is not None and rule.field not in self.lines:
                self.put(rule.field, value, rule.key)


def changes(path: str) -> bool:
    """Whether a field changes what the model learns, rather than where and how fast."""
    fields = [leaf for leaf in leaves(Recipe) if leaf.path == path]
    return not fields or any(leaf.affects not in (Affects.EXECUTION, Affects.PACKING) for leaf in fields)


def _matters(rule: KeyRule | None) -> bool:
    """Whether a value of this key changes the training."""
    if rule is None or rule.kind == "mapped":
        return rule is None or changes(rule.field)
    return rule.kind == "refused" and rule.changes


def _same(value: Any, other: Any) -> bool:
    """1 is 1.0, but not True."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _safe(key: str, value: Any) -> str:
    if isinstance(value, Unknown):
        return value.why
    return SECRET if secret_name(key) else shown(str(without_secrets(value)), 60)
