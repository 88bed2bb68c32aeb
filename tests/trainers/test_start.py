"""What a run may be resumed with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from isotrain.errors import RecipeError
from isotrain.recipe.difference import MAY_CHANGE_ON_RESUME
from isotrain.recipe.load import resolved
from isotrain.recipe.schema import Recipe
from isotrain.trainers.start import check_run
from support import tiny_recipe

SECTIONS: dict[str, dict[str, Any]] = {
    "algorithm": {"name": "grpo"},
    "rollout": {"engine": "hf", "n": 4, "max_tokens": 6},
    "reward": {"function": {"path": "rewards.py:score"}},
    "cluster": {"address": "local"},
}
FREE: dict[str, dict[str, Any]] = {
    "data.tokens_per_micro_batch": {"data": {"tokens_per_micro_batch": 256}},
    "data.validation_rows": {"data": {"validation_rows": 3}},
    "model.attention": {"model": {"attention": "padded"}},
    "model.gradient_checkpointing": {"model": {"gradient_checkpointing": False}},
    "rollout.validation": {"rollout": {"validation": {"n": 3, "temperature": 0.5}}},
    "reward.function.concurrency": {"reward": {"function": {"path": "rewards.py:score", "concurrency": 3}}},
}
BOUND: dict[str, dict[str, Any]] = {
    "data.max_length": {"data": {"max_length": 64}},
    "model.dtype": {"model": {"dtype": "bfloat16"}},
    "rollout.n": {"rollout": {"n": 2}},
    "reward.function.path": {"reward": {"function": {"path": "rewards.py:other"}}},
}


def recipe(tiny: Path, output: Path, changes: dict[str, dict[str, Any]]) -> Recipe:
    merged = {name: {**SECTIONS.get(name, {}), **changes.get(name, {})} for name in {**SECTIONS, **changes}}
    for name, base in (("model", {"path": str(tiny / "model"), "dtype": "float32"}), ("data", {})):
        merged[name] = {**base, **merged.get(name, {})}
    merged["data"] = {
        "train": "prompts.jsonl",
        "batch_size": 8,
        "max_length": 128,
        "tokens_per_micro_batch": 512,
        **merged["data"],
    }
    return tiny_recipe(tiny, output, "cpu", **merged)


@pytest.mark.parametrize("field", [*FREE, *BOUND])
def test_what_may_change_between_two_starts(tiny: Path, tmp_path: Path, field: str) -> None:
    (tmp_path / "resolved.json").write_text(json.dumps(resolved(recipe(tiny, tmp_path, {}))))
    changed = recipe(tiny, tmp_path, {**FREE, **BOUND}[field])
    if field in FREE:
        check_run(changed)
    else:
        with pytest.raises(RecipeError, match=rf"which this one cannot resume:\n  {field}"):
            check_run(changed)


def test_the_page_lists_what_may_change() -> None:
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    table = page.split("These may be different from the first start")[1].split("\n\n")[1]
    listed = {name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    patterns = [name.removesuffix(".*") for name in listed]
    missing = [
        name
        for name in MAY_CHANGE_ON_RESUME
        if not any(name == one or name.startswith(f"{one}.") for one in patterns)
        and not any(other.startswith(f"{name}.") for other in MAY_CHANGE_ON_RESUME)
    ]
    assert not missing and all(name in MAY_CHANGE_ON_RESUME for name in patterns)
