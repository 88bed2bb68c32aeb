"""One-line messages: what is wrong with a value, and what to write instead."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from isotrain.language import listed, tr
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
        return tr("unknown key {name!r}; known here: {known}", name=_short(name), known=", ".join(known))
    if near == name and whose is None:
        # `optimizer.lr: 1e-4` is right on the command line only.
        inside, _, last = name.rpartition(".")
        return tr(
            "unknown key {name!r}; write {last!r} inside the section {inside!r}",
            name=name,
            last=last,
            inside=inside,
        )
    text = tr("unknown key {name!r}; did you mean {near!r}?", name=name, near=near)
    if whose:
        text = tr(
            "unknown key {name!r}; did you mean {near!r}, which belongs to {owners}?",
            name=name,
            near=near,
            owners=_listed(whose.owners),
        )
    return listed((text, note), " ") if note else text


def other_variant(name: str, whose: Misplaced) -> str:
    """The sentence for a key that another variant of the section has: `lam` of ppo under grpo."""
    if len(whose.owners) > _LISTED:
        return tr("unknown key {name!r}; {chosen} has no such key: remove it", name=name, chosen=whose.chosen)
    return tr(
        "unknown key {name!r}; it belongs to {owners}, not to {chosen}: remove it",
        name=name,
        owners=_listed(whose.owners),
        chosen=whose.chosen,
    )


def not_a_section(path: Path, value: Any, spelling: str | None, info: FieldInfo) -> str:
    """The sentence for a value where keys were expected."""
    section = sections(info.annotation)[0]
    text = tr(
        "{name} is {found}; expected a section with keys such as {keys}",
        name=named(path),
        found=_found(value, spelling),
        keys=", ".join(list(section.model_fields)[:4]),
    )
    return _with(text, _hint_for_section(str(path[-1]), value, section, may_be_null(info.annotation)))


def missing(path: str, info: FieldInfo) -> str:
    """The sentence for a field that must be given and was not."""
    example = EXAMPLES.get(path, f"{path.rsplit('.')[-1]}: ...")
    section, takes = path.rpartition(".")[0], expected(info)
    if not section:
        return tr(
            "{path!r} is missing; it takes {takes}: write '{example}'",
            path=path,
            takes=takes,
            example=example,
        )
    return tr(
        "{path!r} is missing; it takes {takes}: write '{example}' in section {section!r}",
        path=path,
        takes=takes,
        example=example,
        section=section,
    )


def wrong_value(path: Path, value: Any, spelling: str | None, info: FieldInfo) -> str:
    """The sentence for a value that its field does not take."""
    return _wrong(
        named(path), _found(value, spelling), expected(info), _hint(value, spelling, info.annotation)
    )


def wrong_item(path: Path, index: int, value: Any, spelling: str | None, info: FieldInfo) -> str:
    """The sentence for one item of a list."""
    lists = [kind for kind in options(info.annotation) if get_origin(kind) in (list, tuple)]
    inner = [get_args(kind)[0] for kind in lists]
    takes = listed([in_words(annotation) for annotation in inner], " or ")
    hint = _hint(value, spelling, inner[0]) if inner else ""
    return _wrong(named((*path, index)), _found(value, spelling), takes, hint)


def _wrong(name: str, found: str, takes: str, hint: str) -> str:
    return _with(tr("{name} is {found}; expected {takes}", name=name, found=found, takes=takes), hint)


def _with(text: str, hint: str) -> str:
    return listed((text, hint), "; ") if hint else text


def _found(value: Any, spelling: str | None) -> str:
    if value is None:
        return tr("empty") if not spelling else "null"
    if isinstance(value, str):
        return tr("the text {text}", text=_short(repr(value)))
    if isinstance(value, dict):
        return tr("a section")
    if isinstance(value, list):
        return tr("the list {items}", items=_short(json.dumps(value, ensure_ascii=False)))
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
        return tr('put it in quotes: "{text}"', text=spelling if spelling is not None else value)
    if isinstance(value, float) and int in kinds and value.is_integer() and abs(value) < 1e15:
        return tr("write {value}", value=int(value))
    return ""


def _hint_for_text(value: str, kinds: tuple[Any, ...], choices: list[str]) -> str:
    word = value.strip().lower()
    if bool in kinds and word in ("yes", "on", "y", "true", "no", "off", "n", "false"):
        return tr("write {value}", value="true" if word in ("yes", "on", "y", "true") else "false")
    if (int in kinds or float in kinds) and _is_number(word):
        return tr("write {value} without quotes", value=word.replace("_", "").replace(",", ""))
    near = [OTHER_VALUES[value]] if OTHER_VALUES.get(value) in choices else []
    near = near or get_close_matches(value[:_SHOWN], choices, n=1, cutoff=0.6)
    if near:
        return tr("did you mean {near!r}?", near=near[0])
    lists = [kind for kind in kinds if get_origin(kind) is list]
    if lists and str not in kinds and not choices:
        return tr("write {value}", value=f"[{_short(value)}]")
    return ""


def _hint_for_section(name: str, value: Any, section: SectionType, optional: bool) -> str:
    first = next(iter(section.model_fields))
    line = ""
    if isinstance(value, str) and value in section.model_fields:
        line = f"'{name}: {{{value}: {{}}}}'"
    elif isinstance(value, str) and first in ("name", "path"):
        line = f"'{name}: {{{first}: {_short(value)}}}'"
    elif isinstance(value, bool) and optional:
        line = f"'{name}: {'{}' if value else 'null'}'"
    return tr("write {value}", value=line) if line else ""


def _listed(names: list[str]) -> str:
    *before, last = names
    return tr("{names} and {last}", names=", ".join(before), last=last) if before else last


def _is_number(word: str) -> bool:
    try:
        float(word.replace("_", "").replace(",", ""))
    except ValueError:
        return False
    return True
