"""Hydra's overrides and configurations as flat keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from isotrain.errors import RecipeError
from isotrain.imports.source import ImportSourceError, Setting, Source, Unknown, flatten
from isotrain.recipe import document

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


def read_overrides(source: Source, words: Iterable[tuple[str | Unknown, int]]) -> None:
    """Words of a command line into `source`: `a.b=c`, `+a.b=c`, `~a.b`, `--config-name`."""
    waiting = ""
    for word, line in words:
        if waiting:
            _option(source, waiting, word, line)
            waiting = ""
            continue
        text = word.text if isinstance(word, Unknown) else word
        name, equals, value = text.partition("=")
        if name in _OPTIONS:
            if equals:
                _option(source, name, word if isinstance(word, Unknown) else value, line)
            else:
                waiting = name
            continue
        found = _KEY.fullmatch(text)
        if not found:
            if text.strip():
                source.remarks.append(f"line {line}: {shown(text)} is not key=value; it was left out")
            continue
        sign, key, value = found[1], found[2], found[3]
        if sign == "~":
            source.settings.pop(key, None)
        elif value is None:
            source.remarks.append(f"line {line}: {shown(text)} is not key=value; it was left out")
        elif isinstance(word, Unknown):
            source.set(key, word if "?" in value else scalar(value), line)
        else:
            parsed = scalar(value)
            for name, part in flatten({key: parsed}).items():
                source.set(name, part, line)


def _option(source: Source, name: str, word: str | Unknown, line: int) -> None:
    text = word.text if isinstance(word, Unknown) else word.strip("'\"").removesuffix(".yaml")
    if name in ("--config-name", "-cn") and text in OWN_CONFIGS:
        if "megatron" in text:
            source.settings.setdefault("actor_rollout_ref.actor.strategy", Setting("megatron", line))
        return
    if name not in ("--config-name", "-cn"):
        return  # where the file of that name is
    source.remarks.append(
        f"line {line}: {name} {shown(text)} names a file that is not read, so its values are missing: import "
        "the resolved configuration instead (.hydra/config.yaml of a run, or its log)"
    )
    source.set("--config-name", text, line)


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
        return plain or None
    try:
        parsed = document.parse(plain, "value")
    except (RecipeError, RecursionError):
        return plain.strip("'\"")
    return plain if parsed.problems else parsed.values


def read_config(source: Source, text: str) -> None:
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
    for key, value in flatten(parsed.values).items():
        source.set(key, value, places.get(key, 0))


def resolve(value: Any, lookup: Callable[[str], Any], depth: int = 0) -> Any:
    """OmegaConf's `${a.b}` and `${oc.select:a.b,default}`, replaced by what they name."""
    if not isinstance(value, str) or "${" not in value or depth > _MOST_REFERENCES:
        return value
    found = _REFERENCE.search(value)
    if not found:
        return value
    inside = found[1].strip()
    if inside.startswith("oc.select:"):
        key, _, default = inside.removeprefix("oc.select:").partition(",")
        result = lookup(key.strip())
        result = scalar(default) if result is None and default else result
    elif inside.startswith("oc.env:"):
        result = Unknown(f"it comes from the environment ({inside.removeprefix('oc.env:')})")
    else:
        result = lookup(inside)
    if isinstance(result, Unknown) or found[0] == value.strip():
        return resolve(result, lookup, depth + 1)
    return resolve(value.replace(found[0], str(result), 1), lookup, depth + 1)


def shown(text: str, longest: int = 80) -> str:
    """Text of a source for messages and comments: one printable line."""
    line = "".join(character if character.isprintable() else "?" for character in str(text))
    return line if len(line) <= longest else f"{line[: longest - 3]}..."
