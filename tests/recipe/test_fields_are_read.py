"""A field that nothing reads is a promise that nobody keeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from isotrain.recipe.fields import leaves
from isotrain.recipe.schema import Recipe

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


def test_reads_sees_code_and_not_text() -> None:
    source = "# lora.rank\n'optimizer.eps'\nrecipe.data.train\nlr = f'{optimizer.lr}'\ndevice.type = 3\n"
    assert set(reads(source)) == {("recipe", "data"), ("data", "train"), ("optimizer", "lr")}


def test_every_field_is_read() -> None:
    files = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in NO_READERS]
    found = {pair for path in files for pair in reads(path.read_text(encoding="utf-8"))}
    unread = []
    # Variants of a section share fields.
    for path in dict.fromkeys(leaf.path for leaf in leaves(Recipe)):
        *sections, field = path.split(".")
        if (sections[-1] if sections else "recipe", field) not in found:
            unread.append(path)
    assert not unread, f"no code reads these fields of the recipe: {', '.join(unread)}"
