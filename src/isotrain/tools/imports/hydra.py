"""Hydra's overrides and configurations as flat keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from isotrain.errors import RecipeError
from isotrain.recipe import document
from isotrain.tools.imports.source import ImportSource, ImportSourceError, Unknown, as_text, flatten

_KEY = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w-]*(?:[./@][\w-]+)*)(?:=(.*))?", re.S)
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
# Tokens of Hydra's grammar (hydra/grammar/OverrideLexer.g4). `~` is added: it is a home directory here.
_QUOTED = re.compile(r"(['\"])((?:\\.|(?!\1)[^\\])*)\1", re.S)
_TEXT = re.compile(r"(?:\$\{[^}]+\}|\\[\\()\[\]{}:=, \t]|[A-Za-z0-9_/\-\\+.$%*@?|:~ \t])+")
_DICT_KEY = re.compile(r"(?:\\[\\()\[\]{}:=, \t]|[A-Za-z0-9_/\-\\+.$%*@?|~ \t])+")
_ESCAPE = re.compile(r"\\([\\()\[\]{}:=, \t])")
_WHOLE = r"(?:0|[1-9](?:_?[0-9])*)"
_POINT = rf"(?:{_WHOLE}?\.[0-9](?:_?[0-9])*|{_WHOLE}\.)"
_INTEGER = re.compile(rf"[+-]?{_WHOLE}")
_FLOAT = re.compile(
    rf"[+-]?(?:{_POINT}|(?:{_POINT}|{_WHOLE})[eE][+-]?[0-9](?:_?[0-9])*|[Ii][Nn][Ff]|[Nn][Aa][Nn])"
)
_MOST_DEPTH = 30
_MOST_REFERENCES = 20
_OPTIONS = {"--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd"}
# Their defaults are those of the tables.
OWN_CONFIGS = {
    "ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "dapo_trainer",
    "dapo_megatron_trainer", "fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer",
    "one_step_off_ppo_trainer", "one_step_off_ppo_megatron_trainer",
}  # fmt: skip


def read_overrides(source: ImportSource, words: Iterable[tuple[str | Unknown, int, str]]) -> None:
    """Words of a command line into `source`: `a.b=c`, `+a.b=c`, `~a.b`, `--config-name`.

    Each word has its line and the condition under which it is there.
    """
    waiting = ""
    for word, line, when in words:
        text, known = as_text(word), word.head if isinstance(word, Unknown) else word
        source.enter(text, line)
        if waiting:
            _option(source, waiting, word, line, when)
            waiting = ""
            continue
        name, equals, value = known.partition("=")
        if name in _OPTIONS and (equals or name == text):
            if equals:
                chosen = Unknown(word.why, value + "?") if isinstance(word, Unknown) else value
                _option(source, name, chosen, line, when)
            else:
                source.entries[-1].outcome = "mapped"  # with the name that follows
                waiting = name
            continue
        key = _KEY.fullmatch(known)
        if isinstance(word, Unknown) and (not key or key[3] is None):
            source.stray(shown(text), f"{word.why}, so it may be any key", line, opens=True)
        elif not key or (key[3] is None and key[1] != "~"):
            what = "an empty word" if not text.strip() else "not key=value"
            source.stray(shown(text), f"it is {what}, so what it changes is not known", line)
        elif key[1] == "~":
            _delete(source, key[2], line)
        elif isinstance(word, Unknown):
            source.set(key[2], replace(word, text=word.text.partition("=")[2]), line, when)
        else:
            try:
                parts = flatten({key[2]: override_value(key[3])})
            except OverrideValueError as error:
                source.stray(shown(text), f"Hydra does not read its value: {error}", line)
                continue
            for name, part in parts.items():
                source.set(name, part, line, when)
    if waiting:
        source.stray(waiting, "nothing follows it", 0)


def _delete(source: ImportSource, key: str, line: int) -> None:
    """`~a.b` takes a key and all below it out of the configuration."""
    for name in [name for name in source.settings if name.startswith(f"{key}.")]:
        source.set(name, Unknown(f"line {line} takes it out of the configuration"), line)
    source.set(key, Unknown(f"line {line} takes it out of the configuration"), line)


def _option(source: ImportSource, name: str, word: str | Unknown, line: int, when: str) -> None:
    """`--config-name` and the options that say where that file is."""
    text = word.text if isinstance(word, Unknown) else word.strip("'\"").removesuffix(".yaml")
    key = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}.get(name, name)
    source.set(key, word if isinstance(word, Unknown) else text, line, when)


class OverrideValueError(ValueError):
    """Text that Hydra's grammar does not have as the value of one run."""


def override_value(text: str) -> Any:
    """The value of an override by Hydra's grammar; `key=` is an empty text."""
    text = text.lstrip(" \t")
    value, end = _element(text, 0, 0) if text else ("", 0)
    if end < len(text):
        raise OverrideValueError(
            "several values are a sweep" if text[end] == "," else f"at {text[end:][:20]!r}"
        )
    return value


def _element(text: str, place: int, depth: int) -> tuple[Any, int]:
    """The value that begins at a place, and where it ends."""
    if depth > _MOST_DEPTH:
        raise OverrideValueError("it is too deeply nested")
    start = text[place : place + 1]
    if start in ("[", "{"):
        return _container(text, place, depth, "]" if start == "[" else "}")
    if quoted := _QUOTED.match(text, place):
        # Backslashes count before a quote only.
        halves = re.sub(rf"(\\+)({quoted[1]}|$)", lambda m: "\\" * (len(m[1]) // 2) + m[2], quoted[2])
        return halves, quoted.end()
    plain = _TEXT.match(text, place)
    if not plain or text[plain.end() : plain.end() + 1] == "(":
        raise OverrideValueError(f"at {text[place:][:20]!r}")
    return _primitive(plain[0].strip(" \t")), plain.end()


def _container(text: str, place: int, depth: int, closing: str) -> tuple[Any, int]:
    items: list[Any] = []
    pairs: dict[str, Any] = {}
    place = _skip(text, place + 1)
    while text[place : place + 1] != closing:
        if items or pairs:
            if text[place : place + 1] != ",":
                raise OverrideValueError(f"at {text[place:][:20] or 'its end'!r}")
            place = _skip(text, place + 1)
        if closing == "]":
            item, place = _element(text, place, depth + 1)
            items.append(item)
        else:
            key = _DICT_KEY.match(text, place)
            if not key or text[key.end() : key.end() + 1] != ":":
                raise OverrideValueError(f"at {text[place:][:20]!r}")
            value, place = _element(text, _skip(text, key.end() + 1), depth + 1)
            pairs[_ESCAPE.sub(r"\1", key[0].strip(" \t"))] = value
        place = _skip(text, place)
    return (items if closing == "]" else pairs), place + 1


def _skip(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\t"):
        place += 1
    return place


def _primitive(text: str) -> Any:
    if text.lower() in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text) if len(text) < 300 else text
    return float(text) if _FLOAT.fullmatch(text) else _ESCAPE.sub(r"\1", text)


def scalar(text: str) -> Any:
    """The value of a flag: numbers, lists and quotes as in an override; all else is text."""
    try:
        return override_value(text)
    except OverrideValueError:
        return text.strip().strip("'\"")


def read_config(source: ImportSource, text: str) -> None:
    """A configuration file into `source`; no tags, no anchors, bounded size and depth."""
    try:
        parsed = document.parse(text, "the configuration")
    except RecipeError as error:
        raise ImportSourceError(str(error)) from None
    except RecursionError:
        raise ImportSourceError("the configuration is too deeply nested to be read") from None
    if not isinstance(parsed.values, dict):
        raise ImportSourceError("the configuration has no 'key: value' lines")
    places = {document.dotted(path): place.order[1] for path, place in parsed.places.items()}
    source.expected = count_leaves(parsed.values)
    for problem in parsed.problems:
        source.stray(
            document.dotted(problem.path) or "the configuration", problem.text, problem.place.order[1]
        )
    for key, value in flatten(parsed.values).items():
        source.enter(key, places.get(key, 0))
        source.set(key, value, places.get(key, 0))


def count_leaves(values: Any) -> int:
    """Values of nested sections; an empty section is one."""
    return sum(map(count_leaves, values.values())) if isinstance(values, dict) and values else 1


def resolve(value: Any, lookup: Callable[[str], Any], depth: int = 0) -> Any:
    """OmegaConf's `${a.b}` and `${oc.select:a.b,default}`, replaced by what they name."""
    if not isinstance(value, str) or "${" not in value or depth > _MOST_REFERENCES:
        return value
    reference = _REFERENCE.search(value)
    if not reference:
        return value
    inside = reference[1].strip()
    if inside.startswith("oc.select:"):
        key, _, default = inside.removeprefix("oc.select:").partition(",")
        result = lookup(key.strip())
        result = scalar(default) if result is None and default else result
    elif inside.startswith("oc.env:"):
        result = Unknown(f"it comes from the environment ({inside.removeprefix('oc.env:')})")
    else:
        result = lookup(inside)
    if isinstance(result, Unknown) or reference[0] == value.strip():
        return resolve(result, lookup, depth + 1)
    return resolve(value.replace(reference[0], str(result), 1), lookup, depth + 1)


def shown(text: str, longest: int = 80) -> str:
    """Text of a source for messages and comments: one printable line."""
    line = "".join(character if character.isprintable() else "?" for character in str(text))
    return line if len(line) <= longest else f"{line[: longest - 3]}..."
