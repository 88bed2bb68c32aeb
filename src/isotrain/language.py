"""Texts for people in the language they read; English is what programs, files and logs get.

`tr` makes an English text that remembers its template and values. It is a `str` like any other, so whatever
stores, compares or writes it has English. Only where something is printed for a person, `said` puts it into
the chosen language: by the template, which is the key of `translations/zh/*.json`.
"""

from __future__ import annotations

import json
import os
import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from importlib.resources import files
from typing import Any


class Language(str, Enum):
    en = "en"
    zh = "zh"


_chosen = Language.en
# POSIX: the first that is set decides, and LC_ALL=C is English on a machine with LANG=zh_CN.UTF-8.
_LOCALE_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")
_CLOSES = ("。", "，", "；", "：", "！", "？")


class Message(str):
    """An English text with its template and values, or with parts and what stands between them."""

    template: str
    values: Mapping[str, Any]
    parts: tuple[str, ...]

    def __new__(
        cls, english: str, template: str, values: Mapping[str, Any], parts: tuple[str, ...] = ()
    ) -> Message:
        message = super().__new__(cls, english)
        message.template, message.values, message.parts = template, values, parts
        return message

    def __reduce__(self) -> tuple[Any, ...]:
        return Message, (str(self), self.template, self.values, self.parts)

    def rewritten(self, change: Callable[[str], str]) -> Message:
        """With `change` done to the text and to every text in it."""

        def changed(value: Any) -> Any:
            if isinstance(value, Message):
                return value.rewritten(change)
            return change(value) if isinstance(value, str) else value

        values = {name: changed(value) for name, value in self.values.items()}
        return Message(change(str(self)), self.template, values, tuple(map(changed, self.parts)))


def tr(template: str, /, **values: Any) -> str:
    """The text of a whole sentence or label; `template` is as for `str.format`, and a literal.

    What follows a `|` is not said: it tells texts apart that are one in English.
    """
    return Message(template.partition("|")[0].format(**values), template, values)


def listed(parts: Iterable[str], separator: str = ", ") -> str:
    """Texts one after the other, as `separator.join` does it."""
    kept = tuple(parts)
    return Message(separator.join(kept), separator, {}, kept)


def capital(text: str) -> str:
    """With a capital at the start, where the language has them."""
    english = text[:1].upper() + text[1:]
    if isinstance(text, Message):
        return Message(english, text.template, text.values, text.parts)
    return english


def said(text: str) -> str:
    """A text in the chosen language; in English where the catalogue does not have it."""
    if _chosen is Language.en or not isinstance(text, Message):
        return str(text)
    template = _catalogue(_chosen).get(text.template)
    if text.parts:
        return _joined(template or text.template, [said(part) for part in text.parts])
    if template is None:
        return str(text)
    return _filled(template, text.values)


def words_of(error: BaseException) -> str:
    """Message of an error in the chosen language."""
    first = error.args[0] if len(error.args) == 1 else None
    return said(first) if isinstance(first, Message) else str(error)


def padded(text: str, width: int) -> str:
    """A text filled up with spaces to columns of a terminal, where a Chinese character takes two."""
    return text + " " * (width - len(text) - sum(map(_is_wide, text)))


def language_of(variables: Mapping[str, str]) -> Language:
    """The language of a locale."""
    locale = next((variables[name] for name in _LOCALE_VARIABLES if variables.get(name)), "")
    return Language.zh if re.match(r"zh([_.@-]|$)", locale) else Language.en


@contextmanager
def using(language: Language | None = None) -> Iterator[None]:
    """Inside, `said` speaks this language, or else that of the locale."""
    global _chosen
    before, _chosen = _chosen, language or language_of(os.environ)
    try:
        yield
    finally:
        _chosen = before


def chosen() -> Language:
    return _chosen


def _filled(template: str, values: Mapping[str, Any]) -> str:
    """`template.format`, with texts of ours in the chosen language.

    A template has spaces around a placeholder, which suit a name or number; between two Chinese characters
    there is none.
    """
    known = {name: said(value) if isinstance(value, Message) else value for name, value in values.items()}
    formatter = string.Formatter()
    literals, inserted = [""], [""]
    for literal, name, spec, conversion in formatter.parse(template):
        literals[-1] += literal
        if name is not None:
            value = formatter.convert_field(known[name], conversion)
            inserted.append(formatter.format_field(value, spec or ""))
            literals.append("")
    text = ""
    for at, literal in enumerate(literals):
        text += inserted[at]
        after = inserted[at + 1] if at + 1 < len(inserted) else ""
        if literal.startswith(" ") and _are_wide(text, literal[1:] or after):
            literal = literal[1:]
        if literal.endswith(" ") and _are_wide(text + literal[:-1], after):
            literal = literal[:-1]
        text += literal
    return text


def _joined(separator: str, parts: Sequence[str]) -> str:
    """`separator.join`, without the spaces that Chinese has not: between characters, after a full stop."""
    text = parts[0]
    for part in parts[1:]:
        between = separator
        if between.startswith(" ") and (text.endswith(_CLOSES) or _are_wide(text, between[1:] or part)):
            between = between[1:]
        if between.endswith(" ") and _are_wide(text + between[:-1], part):
            between = between[:-1]
        text += between + part
    return text


def _are_wide(before: str, after: str) -> bool:
    return bool(before and after) and _is_wide(before[-1]) and _is_wide(after[0])


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


@lru_cache(maxsize=1)
def _catalogue(language: Language) -> dict[str, str]:
    """English templates and those of the language, of all files."""
    folder = files("isotrain").joinpath("translations").joinpath(language.value)
    templates: dict[str, str] = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        templates |= json.loads(file.read_text(encoding="utf-8"))
    return templates
