"""Write the recipe reference page from the schema: `python -m isotrain.recipe.reference PATH`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from isotrain.recipe.fields import Leaf, SectionType, expected, may_be_null, sections, tag
from isotrain.recipe.schema import Recipe
from isotrain.recipe.section import Affects, DefaultFor, Section


def table_row(*cells: str) -> str:
    """One row of a Markdown table, whatever the cells hold."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page_command(command: str, render: Callable[[], str], arguments: Sequence[str] | None = None) -> int:
    """Write or check a generated page, as `command` does; returns its exit code."""
    parser = argparse.ArgumentParser(prog=command)
    parser.add_argument("path", type=Path, help="the page to write")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    options = parser.parse_args(arguments)
    page = render()
    if not options.check:
        options.path.write_text(page, encoding="utf-8")
        return 0
    if options.path.is_file() and options.path.read_text(encoding="utf-8") == page:
        return 0
    print(f"{options.path} is out of date: run `{parser.prog} {options.path}`", file=sys.stderr)
    return 1


Fields = Mapping[str, FieldInfo]

_HEAD = """# Recipe reference

[中文](zh/recipe-reference.md)

Every field that a recipe can have. This page is generated from the schema by
`python -m isotrain.recipe.reference docs/recipe-reference.md`; the guide is [recipe.md](recipe.md).

A name with dots is a key inside sections: `model.lora.rank` is `rank` in `lora` in `model`. The command line
takes the same name: `isotrain train recipe.yaml model.lora.rank=16`.

A section marked *optional* is off unless you write it. `gsm8k:` with nothing below it is on, with all its
defaults; `gsm8k: null` is off. Online algorithms need `rollout` and `reward`.

What a field *affects* decides whether it may change on resume and between compared runs:
"""


def render(model: SectionType = Recipe) -> str:
    """The whole page as Markdown."""
    return "\n".join([_HEAD, *_effects(), *_tables(model, "", "Top level", "")])


def _effects() -> Iterator[str]:
    yield "| affects | part of a run | may change on resume | may differ between compared runs |"
    yield "|---|---|---|---|"
    for kind in Affects:
        responses = (kind.may_change_on_resume, kind.may_differ_in_parity)
        yield table_row(_word(kind), kind.value, *("yes" if response else "no" for response in responses))
    yield ""


def _word(kind: Affects) -> str:
    return kind.name.lower()


def _tables(model: SectionType, prefix: str, title: str, meaning: str) -> Iterator[str]:
    yield from _heading(title, meaning)
    yield from _table(_values(prefix, model, model.model_fields))
    yield from _below(model.model_fields, prefix)


def _below(fields: Fields, prefix: str) -> Iterator[str]:
    """The sections among these fields."""
    for name, info in fields.items():
        path, meaning = prefix + name, info.description or ""
        choices = sections(info.annotation)
        if isinstance(info.discriminator, str) and len(choices) > 1:
            yield from _variants(choices, info.discriminator, path, meaning)
        elif choices:
            optional = " *Optional.*" if may_be_null(info.annotation) else ""
            yield from _tables(choices[0], f"{path}.", f"`{path}`", meaning + optional)


def _variants(choices: list[SectionType], key: str, path: str, meaning: str) -> Iterator[str]:
    """The names to choose from, then what those of one base share, then what each adds."""
    prefix = f"{path}."
    yield from _heading(f"`{path}`", meaning)
    yield from _table([Leaf(prefix + key, choice, choice.model_fields[key]) for choice in choices])
    for base, family in _families(choices).items():
        shared = {name: info for name, info in base.model_fields.items() if name != key}
        if shared:
            names = ", ".join(f"`{tag(choice, key)}`" for choice in family)
            yield from _heading(f"`{path}`: fields of {names}", "")
            yield from _table(_values(prefix, base, shared))
            yield from _below(shared, prefix)
        for choice in family:
            fields = choice.model_fields.items()
            added = {name: info for name, info in fields if name != key and name not in shared}
            if added:
                yield from _heading(f"`{path}`: `{tag(choice, key)}` also has", "")
                yield from _table(_values(prefix, choice, added))
                yield from _below(added, prefix)


def _families(choices: list[SectionType]) -> dict[SectionType, list[SectionType]]:
    """Variants by the section that they extend."""
    families: dict[SectionType, list[SectionType]] = {}
    for choice in choices:
        base = choice.__bases__[0]
        assert issubclass(base, Section)
        families.setdefault(base, []).append(choice)
    return families


def _values(prefix: str, section: SectionType, fields: Fields) -> list[Leaf]:
    return [
        Leaf(prefix + name, section, info) for name, info in fields.items() if not sections(info.annotation)
    ]


def _heading(title: str, meaning: str) -> Iterator[str]:
    yield f"## {title}\n"
    if meaning:
        yield f"{meaning}\n"


def _table(fields: Sequence[Leaf]) -> Iterator[str]:
    if not fields:
        return
    yield "| field | takes | default | affects | meaning |"
    yield "|---|---|---|---|---|"
    for field in fields:
        info = field.info
        meaning = " ".join((info.description or "").split())  # a row is one line
        yield table_row(f"`{field.path}`", expected(info), _default(info), _word(field.affects), meaning)
    yield ""


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    default = _shown(info.get_default(call_default_factory=True, validated_data={}))
    others = [item for item in info.metadata if isinstance(item, DefaultFor)]
    return default + "".join(f"; {_shown(item.value)} for {item.case}" for item in others)


def _shown(value: Any) -> str:
    plain = isinstance(value, str) and value.isprintable()
    return f"`{value if plain else json.dumps(value)}`"


def main(arguments: Sequence[str] | None = None) -> int:
    return page_command("python -m isotrain.recipe.reference", render, arguments)


if __name__ == "__main__":
    sys.exit(main())
