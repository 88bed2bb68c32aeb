"""Hydra's overrides and configurations as flat keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from isotrain.errors import RecipeError
from isotrain.recipe import document
from isotrain.tools.imports.source import ImportSource, ImportSourceError, Unknown, as_text, flatten

_KEY = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./@-]*)(?:=(.*))?", re.S)
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_QUOTED = re.compile(r"(['\"])((?:(?!\1)[^\\]|\\.)*)\1", re.S)
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
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
            for name, part in flatten({key[2]: scalar(key[3])}).items():
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


def scalar(text: str) -> Any:
    """The value of an override: YAML covers Hydra's numbers, lists and quotes; all else is text."""
    plain = text.strip()
    if re.fullmatch(r"-?\d{1,15}", plain):
        return int(plain)
    if _PLAIN.fullmatch(plain):
        return {"true": True, "false": False, "null": None}.get(plain.lower(), plain)
    if quoted := _QUOTED.fullmatch(plain):
        return re.sub(r"\\(['\"\\])", r"\1", quoted[2])
    if _REFERENCE.search(plain) or not plain:
        return plain
    try:
        parsed = document.parse(plain, "value")
    except (RecipeError, RecursionError):
        return plain.strip("'\"")
    return plain if parsed.problems else parsed.values


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
