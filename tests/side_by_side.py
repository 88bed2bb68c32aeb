"""What the guides for users of another trainer state in tables and code blocks."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import yaml

from isotrain.recipe.load import parse_recipe, resolved
from isotrain.tools.imports.convert import Imported
from isotrain.tools.imports.keys import NONE, KeyTable
from isotrain.tools.imports.source import flatten

DOCS = Path(__file__).parents[1] / "docs"
OURS = """
name: a
output: a
model: {path: m}
data: {train: a.parquet}
algorithm: {name: grpo}
rollout: {n: 2}
reward: {gsm8k: }
cluster:
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def check_defaults(key: str, theirs: str, field: str, ours: str, table: KeyTable) -> None:
    """One row of a table with the defaults of both sides; the newest version's on theirs."""
    rule = table.exact[key]
    assert rule.kind == "mapped" and rule.field == field
    default = rule.default(-1)
    assert (None if default is NONE else default) == value(theirs)
    if field != "rollout.n":  # GRPO needs more than the default
        assert flatten(resolved(parse_recipe(OURS, "ours")))[field] == value(ours)


def check_recipe(shown: str, imported: Imported) -> None:
    """Every field that the page writes has the value that the import gives it."""
    page, script = (flatten(resolved(parse_recipe(text, "recipe"))) for text in (shown, imported.recipe))
    written = flatten(yaml.safe_load(shown))
    assert len(written) > 10
    assert {name: page[name] for name in written} == {name: script[name] for name in written}
