"""docs/from-openrlhf.md: its flags, defaults, recipe and reward function are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isotrain.observe.run_directory import RunDirectory
from isotrain.process.pool import Pool
from isotrain.rewards.base import RewardInput
from isotrain.rewards.function import REWARD_CALLS, read_source
from isotrain.tools.imports.convert import convert
from isotrain.tools.imports.keys import openrlhf_ppo
from isotrain.tools.imports.openrlhf import ESTIMATORS
from side_by_side import DOCS, blocks, check_defaults, check_recipe

PAGE = (DOCS / "from-openrlhf.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| `([\w.]+)` \| `(\w+)` \| `([^`]+)` \| `([\w.]+)` \| `([^`]+)` \|$", PAGE, re.MULTILINE
)
THEIRS = """
import torch


def reward_func(queries, prompts, labels, **kwargs):
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    return {"rewards": torch.tensor([float(q.endswith(label)) for q, label in zip(queries, labels)])}
"""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_defaults(row: tuple[str, str, str, str, str]) -> None:
    dotted, flat, *rest = row
    assert openrlhf_ppo().flat[flat] == dotted
    check_defaults(dotted, *rest, openrlhf_ppo())


def test_there_are_rows() -> None:
    assert len(ROWS) == 16


def test_the_recipe_is_that_of_the_command() -> None:
    """Written with dotted flags and with flat ones."""
    pytest.importorskip("tree_sitter_bash")
    script = blocks(PAGE, "bash")[0]
    flat = {new: old for old, new in openrlhf_ppo().flat.items()}
    older = re.sub(r"--([\w.]+)", lambda found: f"--{flat[found[1]]}", script)
    assert older != script
    for text, version in ((script, "0.11.0"), (older, "0.10.1")):
        imported = convert(text.encode(), "openrlhf")
        check_recipe(blocks(PAGE, "yaml")[0], imported)
        assert imported.version == version and len(imported.questions) == 1
        assert not imported.refused and not imported.unknown


def test_flags_of_the_concepts_are_known() -> None:
    flags = set(re.findall(r"`--([\w.]+)", PAGE))
    assert len(flags) > 5 and [name for name in flags if name not in openrlhf_ppo().exact] == []


def test_estimators() -> None:
    text = PAGE.partition("`--algo.advantage.estimator` is `algorithm.name`:")[2].partition("\n\n")[0]
    shown = dict(re.findall(r"`([\w]+)`(?: and `\w+`)? (?:is|are)\s+`([\w+-]+)`", text))
    shown["dr_grpo"] = "grpo"
    assert "`dr_grpo` are `grpo`" in text
    assert shown == ESTIMATORS


def test_the_reward_function_calls_theirs(tmp_path: Path) -> None:
    (tmp_path / "reward_func.py").write_text(THEIRS)
    file = tmp_path / "openrlhf_reward.py"
    file.write_text(blocks(PAGE, "python")[0])
    path = f"{file}:score"
    setup = {"kind": "function", "path": path, "source": read_source(path)}
    pool = Pool(REWARD_CALLS, setup, name="reward.function", timeout=60.0)
    try:
        row = {"question": "What is 8 x 9?"}
        items = [RewardInput(text, "72", row) for text in ("It is 72", "It is 71")]
        assert [future.result(120).score for future in pool.submit(items)] == [1.0, 0.0]
    finally:
        pool.close()


def test_files_of_a_run() -> None:
    run = RunDirectory("runs/grpo")
    for path in (run.recipe, run.log, run.metrics, run.checkpoints / "step-N"):
        assert f"`{path}`" in PAGE
