"""One-line messages: what is wrong with a value, and what to write instead."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from isotrain.recipe.document import Path, named
from isotrain.recipe.fields import Misplaced, SectionType, expected, in_words, may_be_null, options, sections
from isotrain.recipe.names import OTHER_VALUES

# One line of a recipe for each field that has no default.
EXAMPLES = {
    "name": "name: my-run",
    "output": "output: runs/my-run",
    "model.path": "path: Qwen/Qwen3-0.6B",
    "data.train": "train: data/train.jsonl",
    "algorithm.name": "name: sft",
    "reward.function.path": "path: rewards.py:score",
    "rollout.environment.path": "path: env.py:Calculator",
    "reward.plugin.name": "name: my-reward",
    "algorithm.advantage.name": "name: my-advantage",
    "algorithm.loss.plugin.name": "name: my-loss",
    "reward.model.path": "path: models/my-reward-model",
    "reward.process.path": "path: models/my-process-reward-model",
}

_SHOWN = 60
_LISTED = 3


def unknown_key(name: str, near: str | None, known: list[str], whose: Misplaced | None, note: str) -> str:
    """The sentence for a key that is not in the schema; `near` is what it was probably meant to be.

    `whose` is known if `near` is not a key of the chosen variant; `note` is said after it.
    """
    if near is None:
        return f"unknown key {_short(name)!r}; known here: {', '.join(known)}"
    if near == name and whose is None:
        # `optimizer.lr: 1e-4` is right on the command line only.
        inside, _, last = name.rpartition(".")
        return f"unknown key {name!r}; write {last!r} inside the section {inside!r}"
    owners = f", which belongs to {_listed(whose.owners)}" if whose else ""
    return f"unknown key {name!r}; did you mean {near!r}{owners}?{note and f' {note}'}"


def other_variant(name: str, whose: Misplaced) -> str:
    """The sentence for a key that another variant of the section has: `lam` of ppo under grpo."""
    if len(whose.owners) > _LISTED:
        return f"unknown key {name!r}; {whose.chosen} has no such key: remove it"
    return f"unknown key {name!r}; it belongs to {_listed(whose.owners)}, not to {whose.chosen}: remove it"


def not_a_section(path: Path, value: Any, spelling: str | None, info: FieldInfo) -> str:
    """The sentence for a value where keys were expected."""
    section = sections(info.annotation)[0]
    inner = ", ".join(list(section.model_fields)[:4])
    hint = _hint_for_section(str(path[-1]), value, section, may_be_null(info.annotation))
    return f"{named(path)} is {_found(value, spelling)}; expected a section with keys such as {inner}{hint}"


def missing(path: str, info: FieldInfo) -> str:
    """The sentence for a field that must be given and was not."""
    example = EXAMPLES.get(path, f"{path.rsplit('.')[-1]}: ...")
    section = path.rpartition(".")[0]
    where = f" in section {section!r}" if section else ""
    return f"{path!r} is missing; it takes {expected(info)}: write '{example}'{where}"


def wrong_value(path: Path, value: Any, spelling: str | None, info: FieldInfo) -> str:
    """The sentence for a value that its field does not take."""
    hint = _hint(value, spelling, info.annotation)
    return f"{named(path)} is {_found(value, spelling)}; expected {expected(info)}{hint}"


def wrong_item(path: Path, index: int, value: Any, spelling: str | None, info: FieldInfo) -> str:
    """The sentence for one item of a list."""
    lists = [kind for kind in options(info.annotation) if get_origin(kind) in (list, tuple)]
    inner = [get_args(kind)[0] for kind in lists]
    words = " or ".join(in_words(annotation) for annotation in inner)
    hint = _hint(value, spelling, inner[0]) if inner else ""
    return f"{named((*path, index))} is {_found(value, spelling)}; expected {words}{hint}"


def _found(value: Any, spelling: str | None) -> str:
    if value is None:
        return "empty" if not spelling else "null"
    if isinstance(value, str):
        return f"the text {_short(repr(value))}"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return f"the list {_short(json.dumps(value, ensure_ascii=False))}"
    return _short(spelling if spelling is not None else json.dumps(value))


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _hint(value: Any, spelling: str | None, annotation: Any) -> str:
    """What to write instead, where that can be told from what was written."""
    kinds = options(annotation)
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if isinstance(value, str):
        return _hint_for_text(value, kinds, choices)
    if isinstance(value, (bool, int, float)) and str in kinds:
        return f'; put it in quotes: "{spelling if spelling is not None else value}"'
    if isinstance(value, float) and int in kinds and value.is_integer() and abs(value) < 1e15:
        return f"; write {int(value)}"
    return ""


def _hint_for_text(value: str, kinds: tuple[Any, ...], choices: list[str]) -> str:
    word = value.strip().lower()
    if bool in kinds and word in ("yes", "on", "y", "true", "no", "off", "n", "false"):
        return f"; write {'true' if word in ('yes', 'on', 'y', 'true') else 'false'}"
    if (int in kinds or float in kinds) and _is_number(word):
        return f"; write {word.replace('_', '').replace(',', '')} without quotes"
    near = [OTHER_VALUES[value]] if OTHER_VALUES.get(value) in choices else []
    near = near or get_close_matches(value[:_SHOWN], choices, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    lists = [kind for kind in kinds if get_origin(kind) is list]
    if lists and str not in kinds and not choices:
        return f"; write [{_short(value)}]"
    return ""


def _hint_for_section(name: str, value: Any, section: SectionType, optional: bool) -> str:
    first = next(iter(section.model_fields))
    if isinstance(value, str) and value in section.model_fields:
        return f"; write '{name}: {{{value}: {{}}}}'"
    if isinstance(value, str) and first in ("name", "path"):
        return f"; write '{name}: {{{first}: {_short(value)}}}'"
    if isinstance(value, bool) and optional:
        return f"; write '{name}: {'{}' if value else 'null'}'"
    return ""


def _listed(names: list[str]) -> str:
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last


def _is_number(word: str) -> bool:
    try:
        float(word.replace("_", "").replace(",", ""))
    except ValueError:
        return False
    return True
