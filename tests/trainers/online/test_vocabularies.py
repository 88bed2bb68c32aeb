"""Reward models and critics with another tokenizer than the policy's are refused before workers start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from online_runs import online_recipe

from isotrain.errors import ModelError
from isotrain.trainers.online.precheck import check_online

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
ROLES: dict[str, Callable[[str], dict[str, Any]]] = {
    "reward.model.path": lambda path: {"reward": {"model": {"path": path}}},
    "reward.process.path": lambda path: {"reward": {"process": {"path": path}}},
    "algorithm.critic.path": lambda path: {"algorithm": {"name": "ppo", "critic": {"path": path}}},
}


def copied(tiny: Path, to: Path, change: Callable[[dict[str, int]], None] | None = None) -> str:
    """The tiny model's description and tokenizer, its vocabulary changed."""
    to.mkdir()
    for name in FILES:
        shutil.copy(tiny / "model" / name, to / name)
    (to / "model.safetensors").touch()
    if change:
        tokenizer = json.loads((to / "tokenizer.json").read_text(encoding="utf-8"))
        change(tokenizer["model"]["vocab"])
        (to / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return str(to)


def swap(vocabulary: dict[str, int]) -> None:
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


@pytest.mark.parametrize("field", ROLES)
def test_another_numbering_is_refused(tiny: Path, tmp_path: Path, field: str) -> None:
    same = ROLES[field](copied(tiny, tmp_path / "same"))
    assert check_online(online_recipe(tiny, tmp_path, "cpu", **same)) == []
    other = ROLES[field](copied(tiny, tmp_path / "other", swap))
    with pytest.raises(ModelError, match=rf"{field}: its tokenizer is not the policy's: '[ab]' has number"):
        check_online(online_recipe(tiny, tmp_path, "cpu", **other))


def test_warns_of_tokens_that_a_reward_model_lacks(tiny: Path, tmp_path: Path) -> None:
    role = ROLES["reward.model.path"]
    path = copied(tiny, tmp_path / "judge", lambda vocabulary: vocabulary.pop("~") and None)
    (warning,) = check_online(online_recipe(tiny, tmp_path, "cpu", **role(path)))
    assert warning == ("reward.model.path: its tokenizer lacks 1 token(s) of the policy, such as '~'")
    config = json.loads((tmp_path / "judge" / "config.json").read_text())
    (tmp_path / "judge" / "config.json").write_text(json.dumps({**config, "vocab_size": 10}))
    with pytest.raises(ModelError, match="it has 10 tokens but not '~'"):
        check_online(online_recipe(tiny, tmp_path, "cpu", **role(path)))


def test_warns_of_a_reward_model_without_a_tokenizer(tiny: Path, tmp_path: Path) -> None:
    path = Path(copied(tiny, tmp_path / "judge"))
    for name in FILES[1:]:
        (path / name).unlink()
    recipe = online_recipe(tiny, tmp_path, "cpu", **ROLES["reward.model.path"](str(path)))
    assert [warning for warning in check_online(recipe) if "has no tokenizer" in warning]
