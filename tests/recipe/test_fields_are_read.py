"""A field that nothing reads is a promise that nobody keeps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from isotrain.recipe.fields import leaves
from isotrain.recipe.schema import Recipe
from isotrain.recipe.section import Section

SOURCE = Path(__file__).parents[2] / "src" / "isotrain"
# The schema's own rooms, and the command line, which shows values but does not act on them.
NO_READERS = {"recipe", "cli"}


def reads(source: str) -> Iterator[tuple[str, str]]:
    """Each `section.field` that is read: configuration objects are named after their section."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if isinstance(owner, ast.Name):
                yield owner.id, node.attr
            elif isinstance(owner, ast.Attribute):
                yield owner.attr, node.attr
        elif isinstance(node, ast.FunctionDef):
            yield from reads_of_arguments(node)


def reads_of_arguments(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Each `argument.field` of an argument that is annotated with classes of sections, by their names."""
    types = {
        argument.arg: re.findall(r"\w+Section", ast.unparse(argument.annotation))
        for argument in function.args.args
        if argument.annotation
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield from ((name, node.attr) for name in types.get(node.value.id, ()))


def classes(section: str) -> set[str]:
    """Names of the classes that a section of this name has anywhere in the schema."""
    every, found = [Section], set()
    for model in every:
        every += model.__subclasses__()
        if info := model.model_fields.get(section):
            found |= set(re.findall(r"\w+Section", str(info.annotation)))
    return found


def test_reads_sees_code_and_not_text() -> None:
    source = "# lora.rank\n'optimizer.eps'\nrecipe.data.train\nlr = f'{optimizer.lr}'\ndevice.type = 3\n"
    assert set(reads(source)) == {("recipe", "data"), ("data", "train"), ("optimizer", "lr")}
    typed = "def f(one: ASection | BSection, two: int):\n    return one.field, two.real\n"
    assert {("ASection", "field"), ("BSection", "field")} <= set(reads(typed))
    assert "FunctionSection" in classes("function") and "FunctionSection" not in classes("plugin")


def test_every_field_is_read() -> None:
    files = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in NO_READERS]
    found = {pair for path in files for pair in reads(path.read_text(encoding="utf-8"))}
    unread = []
    # Variants of a section share fields.
    for path in dict.fromkeys(leaf.path for leaf in leaves(Recipe)):
        *sections, field = path.split(".")
        section = sections[-1] if sections else "recipe"
        if not found & {(name, field) for name in {section, *classes(section)}}:
            unread.append(path)
    assert not unread, f"no code reads these fields of the recipe: {', '.join(unread)}"
