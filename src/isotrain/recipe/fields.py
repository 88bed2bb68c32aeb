"""Every field of the schema by its dotted name, with its type in plain words."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from isotrain.language import listed, tr
from isotrain.recipe.section import Affects, Section

SectionType = type[Section]

_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._+-]*$": tr("of letters, digits and . _ + -, starting with a letter or digit"),
    r"^[^:\x00]+\.py:[A-Za-z_]\w*$": tr("of the form FILE.py:FUNCTION"),
    r"^(bubblewrap|https?://[^\s/@?#:]+(:\d{1,5})?(/[^\s?#]*)?)$": tr(
        "that is http://HOST:PORT or bubblewrap"
    ),
    r"^[A-Za-z0-9][\w./@-]*$": tr("of letters, digits and . _ / @ -, starting with a letter or digit"),
    r"^(auto|local|[^/\s]+:\d+)$": tr("of the form HOST:PORT (a ray:// client does not work), local or auto"),
}


@dataclass(frozen=True)
class Leaf:
    """A field that holds a value rather than a section."""

    path: str
    section: SectionType
    info: FieldInfo

    @property
    def affects(self) -> Affects:
        """From the field's annotation, or else from its section."""
        annotated = (item for item in self.info.metadata if isinstance(item, Affects))
        return next(annotated, self.section.affects)


@dataclass(frozen=True)
class Misplaced:
    """A path that the chosen variant of a section does not have, but others do."""

    owners: list[str]
    chosen: str


def options(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def sections(annotation: Any) -> list[SectionType]:
    """The sections that a field may hold: none for a value, several for a choice such as `algorithm`."""
    return [kind for kind in options(annotation) if isinstance(kind, type) and issubclass(kind, Section)]


def may_be_null(annotation: Any) -> bool:
    return type(None) in options(annotation)


def variants(info: FieldInfo, values: Any) -> list[SectionType]:
    """The sections a field may hold, narrowed to the one that the discriminator in `values` names."""
    candidates = sections(info.annotation)
    key = info.discriminator
    if isinstance(key, str) and isinstance(values, dict):
        return [section for section in candidates if values.get(key) == tag(section, key)] or candidates
    return candidates


def tag(section: SectionType, key: str) -> str:
    """The name that chooses a variant: `grpo`."""
    (name,) = get_args(section.model_fields[key].annotation)
    return str(name)


def misplaced(model: SectionType, path: Sequence[str | int], values: Any) -> Misplaced | None:
    """The variants that have this path, if the one chosen by `values` does not."""
    models, others, key = [model], [model], ""
    for part in map(str, path):
        info = next((model.model_fields[part] for model in models if part in model.model_fields), None)
        if info is None:
            owners = [tag(other, key) for other in others if key and part in other.model_fields]
            return Misplaced(owners, str(values.get(key))) if owners else None
        values = values.get(part) if isinstance(values, dict) else None
        models, others = variants(info, values), sections(info.annotation)
        key = info.discriminator if isinstance(info.discriminator, str) else ""
    return None


def leaves(model: SectionType, prefix: str = "") -> Iterator[Leaf]:
    """Every value field below `model`, in schema order; once per variant."""
    for name, info in model.model_fields.items():
        below = sections(info.annotation)
        for section in below:
            yield from leaves(section, f"{prefix}{name}.")
        if not below:
            yield Leaf(prefix + name, model, info)


def section_paths(model: SectionType, prefix: str = "") -> Iterator[str]:
    """The dotted name of every section below `model`."""
    for name, info in model.model_fields.items():
        below = sections(info.annotation)
        if below:
            yield prefix + name
        for section in below:
            yield from section_paths(section, f"{prefix}{name}.")


def merged(models: Sequence[SectionType]) -> dict[str, FieldInfo]:
    """The fields of a section that may still be one of several; the deciding field takes all their names."""
    fields: dict[str, FieldInfo] = {}
    for model in reversed(models):
        fields.update(model.model_fields)
    for name, info in fields.items():
        kinds = [model.model_fields[name].annotation for model in models if name in model.model_fields]
        if len(kinds) > 1 and all(get_origin(kind) is Literal for kind in kinds):
            choices = tuple(choice for kind in kinds for choice in get_args(kind))
            fields[name] = FieldInfo.merge_field_infos(info, annotation=Literal.__getitem__(choices))
    return fields


def field_at(model: SectionType, path: Sequence[str | int], values: Any) -> FieldInfo | None:
    """The value field at a path, by the variants that `values` choose; None for a section or nothing."""
    models = [model]
    for depth, part in enumerate(path, start=1):
        info = merged(models).get(str(part))
        values = values.get(part) if isinstance(values, dict) else None
        if info is None:
            return None
        models = variants(info, values)
        if not models:
            return info if depth == len(path) else None
    return None


def expected(info: FieldInfo) -> str:
    """Type of a field in plain words: `a whole number, at least 1, or null`."""
    text = listed(
        [in_words(option) for option in options(info.annotation) if option is not type(None)], " or "
    )
    pattern = next((item.pattern for item in info.metadata if getattr(item, "pattern", None)), None)
    if pattern:
        form = _PATTERNS.get(pattern) or tr("matching {pattern}", pattern=pattern)
        text = tr("{text} {form}", text=text, form=form)
    limits = _limits(info)
    if limits:
        text = tr("{text}, {limits}", text=text, limits=listed(limits, " and "))
    if may_be_null(info.annotation):
        text = tr("{text}, or null", text=text)
    return text


def in_words(annotation: Any, plural: bool = False) -> str:
    """One member of a union in plain words."""
    simple = {
        bool: (tr("true or false"), tr("true or false values")),
        int: (tr("a whole number"), tr("whole numbers")),
        float: (tr("a number"), tr("numbers")),
        str: (tr("text"), tr("texts")),
        dict: (tr("a section"), tr("sections")),
    }
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return in_words(args[0], plural)
    if annotation in simple:
        return simple[annotation][plural]
    if origin is Literal:
        choices = ", ".join(repr(choice) for choice in args)
        return choices if plural or len(args) == 1 else tr("one of {choices}", choices=choices)
    if origin is list:
        return tr("a list of {items}", items=in_words(args[0], plural=True))
    if origin is tuple:
        return tr("a list of {count} {items}", count=len(args), items=in_words(args[0], plural=True))
    if origin is dict and get_origin(args[0]) is Literal:
        keys = ", ".join(get_args(args[0]))
        return tr("a section of {values} under {keys}", values=in_words(args[1], plural=True), keys=keys)
    if origin in (Union, types.UnionType):
        return listed([in_words(option, plural) for option in args], " or ")
    return simple[dict][plural]


def _limits(info: FieldInfo) -> list[str]:
    def given(name: str) -> list[Any]:
        return [value for item in info.metadata if (value := getattr(item, name, None)) is not None]

    return [
        *(tr("at least {limit}", limit=limit) for limit in given("ge")),
        *(tr("above {limit}", limit=limit) for limit in given("gt")),
        *(tr("at most {limit}", limit=limit) for limit in given("le")),
        *(tr("below {limit}", limit=limit) for limit in given("lt")),
        *(tr("not shorter than {limit}", limit=limit) for limit in given("min_length")[:1] if limit),
    ]
