"""The reference page of the recipe, written from the schema: `python -m isotrain.recipe.reference PATH`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic.fields import FieldInfo

from isotrain.recipe.fields import SectionType, expected, sections
from isotrain.recipe.schema import Recipe

_HEAD = """# Recipe reference

Every field that a recipe can have. This page is generated from the schema by
`python -m isotrain.recipe.reference docs/recipe-reference.md`; the guide is [recipe.md](recipe.md).

A name with dots is a key inside sections: `model.lora.rank` is `rank` in `lora` in `model`. On the command
line it is written as it stands here: `isotrain train recipe.yaml model.lora.rank=16`.
"""


def render(model: SectionType = Recipe) -> str:
    """The whole page as Markdown."""
    return "\n".join([_HEAD, *_tables(model, "", "Top level", "")])


def _tables(model: SectionType, prefix: str, title: str, meaning: str) -> Iterator[str]:
    values = {name: info for name, info in model.model_fields.items() if not sections(info.annotation)}
    yield f"## {title}\n"
    if meaning:
        yield f"{meaning}\n"
    if values:
        yield "| field | takes | default | meaning |"
        yield "|---|---|---|---|"
        for name, info in values.items():
            cells = (f"`{prefix}{name}`", expected(info), _default(info), info.description or "")
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        yield ""
    for name, info in model.model_fields.items():
        path = prefix + name
        choices = sections(info.annotation)
        for section in choices:
            title = f"`{path}`" if len(choices) == 1 else f"`{path}`: {_tag(section, info)}"
            yield from _tables(section, f"{path}.", title, info.description or "")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    default = info.get_default(call_default_factory=True, validated_data={})
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _tag(section: SectionType, info: FieldInfo) -> str:
    """Which one of several sections this is: the name that chooses it."""
    key = info.discriminator
    if not isinstance(key, str):
        return section.__name__
    return expected(section.model_fields[key])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m isotrain.recipe.reference", description=__doc__)
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


if __name__ == "__main__":
    sys.exit(main())
