"""A document against the schema: the model, or all problems noted in the document."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from isotrain.language import Message, listed, tr
from isotrain.recipe.document import Document, Path, dotted, named
from isotrain.recipe.fields import (
    Misplaced,
    SectionType,
    expected,
    field_at,
    in_words,
    may_be_null,
    merged,
    misplaced,
    options,
    sections,
    tag,
    variants,
)
from isotrain.recipe.names import OTHER_VALUES, all_names, near_section, nearest, note
from isotrain.recipe.section import Section

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


def _wrong(name: str, given: str, takes: str, hint: str) -> str:
    return _with(tr("{name} is {found}; expected {takes}", name=name, found=given, takes=takes), hint)


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
    """A correction of what was written, where there is an obvious one."""
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


Model = TypeVar("Model", bound=Section)

# Comparing names is slow, and nobody reads this many suggestions.
_SUGGESTIONS = 100


def check(document: Document, model: type[Model]) -> Model | None:
    """The validated model, or None with every problem in `document.problems`."""
    walk = _Walk(document, model)
    values = walk.section(document.values, (model,), ())
    walk.report_missing()
    try:
        # Strict JSON: `"3"` is not 3 and 1 is not true, while a list may fill a tuple. Lone surrogates are
        # noted while parsing; here they must only not stop the other checks.
        text = json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")
        valid = model.model_validate_json(text, strict=True)
    except ValidationError as error:
        _report_errors(document, model, error.errors(include_url=False, include_input=False), walk.suggested)
        assert document.problems, "the schema refuses what the messages do not name"
        return None
    return None if document.problems else valid


class _Walk:
    """Compares the keys of a document with those of the schema."""

    def __init__(self, document: Document, model: SectionType) -> None:
        self.document = document
        self.model = model
        self.suggested: set[str] = set()
        self.missing: list[tuple[Path, str]] = []

    @cached_property
    def usable(self) -> list[str]:
        """The names that the chosen variants have."""
        values = self.document.values
        return [name for name in all_names(self.model) if not misplaced(self.model, name.split("."), values)]

    def section(self, values: dict[str, Any], models: tuple[SectionType, ...], path: Path) -> dict[str, Any]:
        """`values` without unknown keys, with `{}` for each section that was left out or left empty."""
        fields = merged(models)
        kept: dict[str, Any] = {}
        for key, value in values.items():
            if key in fields:
                kept[key] = value
            else:
                self.unknown((*path, key), value, list(fields))
        for name, info in fields.items():
            below = tuple(variants(info, kept.get(name)))
            if below:
                self.subsection(kept, name, info, below, (*path, name))
            elif name not in kept and all(
                name in model.model_fields and model.model_fields[name].is_required() for model in models
            ):
                here = (*path, name)
                self.missing.append((here, missing(dotted(here), info)))
        return kept

    def subsection(
        self, kept: dict[str, Any], name: str, info: FieldInfo, below: tuple[SectionType, ...], path: Path
    ) -> None:
        # `optimizer:` with every line below it commented out means all defaults. So does `gsm8k:`, although
        # that section may be null: then null is spelled out, or the key is not there at all.
        if kept.get(name) is None:
            if may_be_null(info.annotation) and not self.is_there(path):
                return
            kept[name] = {}
        if isinstance(kept[name], dict):
            kept[name] = self.section(kept[name], below, path)
            if isinstance(info.discriminator, str) and len(below) == 1:
                self.companions(below[0], tag(below[0], info.discriminator))
            return
        spelling = self.document.spelling.get(path)
        self.document.complain(path, not_a_section(path, kept[name], spelling, info))
        kept[name] = {}
        # Its required keys are then missing too, but that is the same mistake.
        self.suggested.add(dotted(path))

    def is_there(self, path: Path) -> bool:
        """Whether something other than a spelled-out null was written."""
        return _value(self.document.values, path) is not None or self.document.spelling.get(path) == ""

    def companions(self, model: SectionType, by: str) -> None:
        """Name the sections that the chosen variant needs or has no use for."""
        for name, purpose in model.needs.items():
            if not self.is_there((name,)):
                self.missing.append(
                    (
                        (name,),
                        tr("{name!r} is missing; {by} needs it {purpose}", name=name, by=by, purpose=purpose),
                    )
                )
        for name, reason in model.refuses.items():
            if self.is_there((name,)):
                text = tr(
                    "{name!r} cannot be used with {by}, which {reason}; remove it",
                    name=name,
                    by=by,
                    reason=reason,
                )
                self.document.complain((name,), text)

    def unknown(self, path: Path, value: Any, known: list[str]) -> None:
        name = dotted(path)
        whose = misplaced(self.model, path, self.document.values)
        if whose is not None:
            self.document.complain(path, other_variant(name, whose))
            return
        near: str | None = None
        # A misspelled section is one mistake; one that we do not have at all is looked through key by key.
        if isinstance(value, dict) and value:
            near = near_section(name, self.model)
            if near is None:
                for key, inner in value.items():
                    self.unknown((*path, key), inner, known)
                return
        elif len(self.document.problems) < _SUGGESTIONS:
            near = nearest(name, self.model, self.usable)
        if near is not None:
            self.suggested.add(near)
            whose = misplaced(self.model, near.split("."), self.document.values)
        self.document.complain(path, unknown_key(name, near, known, whose, note(name)))

    def report_missing(self) -> None:
        """Name what is missing, unless it is there under a name that was just corrected."""
        for path, text in self.missing:
            name = dotted(path)
            if not any(name == near or name.startswith(f"{near}.") for near in self.suggested):
                self.document.complain(path, text)
            self.document.rejected.add(path)


def _report_errors(
    document: Document, model: SectionType, errors: list[ErrorDetails], suggested: Set[str]
) -> None:
    """Turn pydantic's errors into our sentences: one for each value, or for each item of a list."""
    noted_before = frozenset(document.rejected)
    by_path: dict[Path, dict[int | None, ErrorDetails]] = {}
    for details in errors:
        path, index = _locate(document, model, details)
        by_path.setdefault(path, {})[index] = details
    for path, by_index in by_path.items():
        info = field_at(model, path, document.values)
        if info is None:
            _report_broken_rules(document, path, by_index[None], suggested)
            continue
        if any(path[: len(other)] == other or other[: len(path)] == path for other in noted_before):
            continue
        # `text or a list of texts` fails twice on a list with a number in it: the item says it better.
        indices = [index for index in by_index if index is not None]
        value, spelling = _value(document.values, path), document.spelling
        for index in indices:
            item = (*path, index)
            text = wrong_item(path, index, value[index], spelling.get(item), info)
            document.complain(item, text)
        if not indices and by_index[None]["type"] == "value_error":
            document.complain(path, listed((repr(dotted(path)), *_own_words(by_index[None])), ": "))
        elif not indices:
            document.complain(path, wrong_value(path, value, spelling.get(path), info))


def _report_broken_rules(document: Document, path: Path, details: ErrorDetails, suggested: Set[str]) -> None:
    """Rules between the fields of a section, one a line, each at its first field that was written."""
    rejected = frozenset(document.rejected)
    for text in _own_words(details):
        named: list[Path] = [(*path, *words.split(".")) for words in re.findall(r"\w+(?:\.\w+)*", text)]
        place = next((candidate for candidate in named if candidate in document.places), path)
        # A rule that a misspelled key breaks holds once the key is corrected.
        if not any(candidate in rejected or dotted(candidate) in suggested for candidate in named):
            document.complain(place, listed((dotted(path), text), ": ") if path else text)


def _own_words(details: ErrorDetails) -> list[str]:
    """Messages of a validator of ours, a line each."""
    error = details.get("ctx", {}).get("error")
    words = error.args[0] if isinstance(error, ValueError) else None
    if isinstance(words, Message):
        return list(words.parts) or [words]
    return details["msg"].removeprefix("Value error, ").splitlines()


def _locate(document: Document, model: SectionType, details: ErrorDetails) -> tuple[Path, int | None]:
    """The dotted path of an error, and the item if it is about one item of a list.

    Pydantic also puts the member of a union into its locations (`('data', 'train', 'list[str]', 0)`); those
    parts are no keys of the schema and are left out.
    """
    path: Path = ()
    loc, models, values = details["loc"], [model], document.values
    for position, part in enumerate(loc):
        info = merged(models).get(str(part))
        if info is None:
            continue
        path, values = (*path, part), _value(values, (part,))
        # By what the document chose: `algorithm.loss` is a value of dpo and a section of grpo.
        models = variants(info, values)
        if not models:
            rest = [item for item in loc[position + 1 :] if isinstance(item, int)]
            is_item = bool(rest) and isinstance(values, list) and rest[0] < len(values)
            return path, rest[0] if is_item else None
    if details["type"].startswith("union_tag"):
        path = (*path, details["ctx"]["discriminator"].strip("'"))
    return path, None


def _value(values: Any, path: Path) -> Any:
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values
