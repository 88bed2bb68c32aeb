"""The tables of docs/from-trl.md have the defaults of both sides."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from isotrain.recipe.load import resolved
from isotrain.recipe.schema import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "from-trl.md"
ROW = re.compile(r"\| (?:(SFT|DPO) )?`(\w+)` \| `([^`]+)` \| `([\w.]+)` \| `([^`]+)` \|")
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


def value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


def recipe(algorithm: str) -> dict[str, Any]:
    sections: dict[str, Any] = {"algorithm": {"name": algorithm}}
    if algorithm == "grpo":
        sections |= {"rollout": {"n": 2}, "reward": {"gsm8k": {}}, "data": {"batch_size": 8}}
        sections["data"] |= {"tokens_per_micro_batch": 8192}
    data = {"train": "train.jsonl", **sections.pop("data", {})}
    base = {"name": "a", "output": "a", "model": {"path": "m"}, "data": data, **sections}
    return resolved(Recipe.model_validate(base))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0] or 'GRPO'}-{row[1]}")
def test_defaults(row: tuple[str, str, str, str, str]) -> None:
    kind, argument, theirs, field, ours = row
    found: Any = recipe((kind or "GRPO").lower())
    for part in field.split("."):
        found = found[part]
    if field != "rollout.n":  # GRPO needs more than the default
        assert found == value(ours)
    trl = pytest.importorskip("trl")
    config = getattr(trl, f"{kind or 'GRPO'}Config")
    (own,) = [each for each in dataclasses.fields(config) if each.name == argument]
    assert own.default == value(theirs)


def test_there_are_rows() -> None:
    assert len(ROWS) == 18
