"""A draft as commented YAML, checked as a recipe."""

from __future__ import annotations

import re
from typing import Any

import yaml

from isotrain.errors import RecipeError
from isotrain.recipe.document import RecipeDumper
from isotrain.recipe.load import parse_recipe
from isotrain.recipe.names import all_names
from isotrain.recipe.schema import Recipe
from isotrain.tools.imports.draft import Draft, KeyFinding, RecipeLine
from isotrain.tools.imports.hydra import shown
from isotrain.tools.imports.source import ImportSourceError

_MOST_TRIES = 20
_REQUIRED = {
    "name": "imported",
    "output": "runs/imported",
    "model.path": "MODEL",
    "data.train": "train.parquet",
}
_ORDER = {name: place for place, name in enumerate(dict.fromkeys(all_names(Recipe)))}


def to_text(draft: Draft) -> str:
    """The recipe. A field that the schema refuses becomes a finding instead of a line."""
    for _ in range(_MOST_TRIES):
        text, places = _lines(draft)
        try:
            parse_recipe(text, "recipe")
            return text
        except RecipeError as error:
            problem = str(error)
            if not _remove(draft, problem, places):
                raise ImportSourceError(f"what was read makes no recipe: {shown(problem, 500)}") from None
    raise ImportSourceError("what was read makes no recipe: too many values are out of range")


def _remove(draft: Draft, problem: str, places: dict[int, str]) -> bool:
    """Take the fields out that the messages of `problem` name by line; whether there were any."""
    removed = False
    for message in problem.splitlines():
        located = re.match(r"recipe:(\d+)(?::\d+)?: (.*)", message)
        path = places.get(int(located[1])) if located else None
        if path is None:
            path = next((name for name in draft.lines if re.search(rf"\b{re.escape(name)}\b", message)), None)
        if path in draft.lines:
            line = draft.lines.pop(path)
            if path in _REQUIRED:
                draft.lines[path] = RecipeLine(_REQUIRED[path], "set this")
            why = located[2] if located else message
            draft.refused.append(KeyFinding(line.comment.partition(":")[0] or path, shown(why, 200), 0, True))
            for key in line.keys:
                if draft.outcomes.get(key) == "mapped":
                    draft.outcomes[key] = "refused"
                    draft.mapped.remove(draft.aliases.get(key, key))
            removed = True
    return removed


def _lines(draft: Draft) -> tuple[str, dict[int, str]]:
    """The text, and the field of each line, counted from 1."""
    out = _header(draft)
    places: dict[int, str] = {}
    tree: dict[str, Any] = {}
    for path, line in draft.lines.items():
        inside = tree
        *sections, name = path.split(".")
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = (path, line)
    for section in sorted(tree, key=list(Recipe.model_fields).index):
        _emit(out, places, section, tree[section], 0)
    return "\n".join(out) + "\n", places


def _header(draft: Draft) -> list[str]:
    title = f"# From {draft.framework} ({draft.source.kind}, with the defaults of version {draft.version})."
    lines = [
        title,
        "# Behind each field is the key that it came from. Check it: isotrain train THIS --dry-run",
    ]
    for heading, findings in (
        ("QUESTION", draft.questions),
        ("REFUSED", draft.refused),
        ("UNKNOWN", draft.unknown),
    ):
        for item in findings:
            where = f" (line {item.line})" if item.line else ""
            lines.append(f"# {heading} {shown(item.key, 120)}{where}: {shown(item.why, 400)}")
    for condition in draft.source.conditions:
        lines += [f"# CONDITION {shown(line, 300)}" for line in condition.report()]
    return [*lines, *(f"# NOTE {shown(note, 300)}" for note in draft.notes)]


def _emit(out: list[str], places: dict[int, str], name: str, node: Any, depth: int) -> None:
    indent = "  " * depth
    if isinstance(node, dict):
        if depth == 0 and out:
            out.append("")
        out.append(f"{indent}{name}:")
        # Values first: a section in between would look as if it held those after it.
        for key, inner in sorted(node.items(), key=lambda item: (isinstance(item[1], dict), _place(item[1]))):
            _emit(out, places, key, inner, depth + 1)
        return
    path, line = node
    assert isinstance(line, RecipeLine)
    comment = f"  # {shown(line.comment, 200)}" if line.comment else ""
    if depth == 0 and len(out) and out[-1].startswith("#"):
        out.append("")
    out.append(f"{indent}{name}: {_value(line.value)}{comment}")
    places[len(out)] = path


def _place(node: Any) -> int:
    """The place of a field in the schema; of a section, that of its first field."""
    return min(map(_place, node.values())) if isinstance(node, dict) else _ORDER.get(node[0], 0)


def _value(value: Any) -> str:
    """One value on one line."""
    if isinstance(value, float) and value != 0 and not 1e-3 <= abs(value) < 1e6:
        return re.sub(r"e([+-])0*(\d)", r"e\1\2", repr(value)).replace("e+", "e")
    text = yaml.dump(value, Dumper=RecipeDumper, default_flow_style=True, allow_unicode=True, width=10**9)
    return str(text).removesuffix("\n").removesuffix("\n...").removesuffix("...").strip()
