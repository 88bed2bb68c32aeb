"""docs/from-verl.md: its keys, defaults, recipe and reward functions are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.names import all_names
from isotrain.recipe.schema import Recipe
from isotrain.tools.imports.convert import convert
from isotrain.tools.imports.keys import verl_ppo
from isotrain.tools.imports.verl_algorithm import ESTIMATORS
from side_by_side import DOCS, blocks, check_defaults, check_recipe

PAGE = (DOCS / "from-verl.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([\w.]+)` \| `([^`]+)` \| `([\w.]+)` \| `([^`]+)` \|$", PAGE, re.MULTILINE)
MOST_USED = 25


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_defaults(row: tuple[str, str, str, str]) -> None:
    check_defaults(*row, verl_ppo())


def test_the_most_used_keys_are_there(shared_data: Path) -> None:
    path = shared_data.parent / "import" / "verl-keys.tsv"
    if not path.is_file():
        pytest.skip("no verl-keys.tsv in the shared data")
    keys = [line.split("\t")[0] for line in path.read_text().splitlines() if not line.startswith("#")]
    assert [key for key in keys[1 : 1 + MOST_USED] if f"`{key}`" not in PAGE] == []
    assert len(ROWS) == 15


def test_keys_and_fields_without_defaults() -> None:
    """Rows of two columns: each key leads to one of the fields of its row."""
    rows = PAGE.partition("| `algorithm.adv_estimator`")[2].partition("\n\n")[0].splitlines()
    assert len(rows) == 6
    names = set(all_names(Recipe))
    for row in rows[1:]:
        left, right = row.strip("| ").split(" | ")
        fields = [name for name in re.findall(r"`([\w.]+)`", right) if name in names]
        for key in re.findall(r"`([\w.]+)`", left):
            assert verl_ppo().exact[key].field in fields, key
    theirs, ours = (re.findall(r"`([\w+]+)`", part) for part in rows[0].split(" | ")[:2])
    assert [ESTIMATORS[name] for name in theirs] == ours


def test_the_recipe_is_that_of_the_command() -> None:
    pytest.importorskip("tree_sitter_bash")
    imported = convert(blocks(PAGE, "bash")[0].encode(), "verl")
    check_recipe(blocks(PAGE, "yaml")[0], imported)
    assert imported.same_training


def test_the_reward_functions_agree() -> None:
    found: dict[str, Any] = {}
    exec(blocks(PAGE, "python")[0], found)
    for response, right in (("so it is 72\n", 1.0), ("71", 0.0)):
        assert found["compute_score"]("gsm8k", response, "72") == right
        assert found["score"](response, "72") == right


def test_files_of_a_run() -> None:
    run = RunDirectory("runs/grpo")
    for path in (run.recipe, run.log, run.metrics, run.checkpoints / "step-N"):
        assert f"`{path}`" in PAGE
    assert f"`{run.resolved.name}`" in PAGE
