"""A reward function that has changed since the last start is noticed, by its text and its name."""

from __future__ import annotations

from pathlib import Path

from online_runs import online_recipe

from isotrain.rewards.build import reward_source
from isotrain.trainers.online.precheck import UserFiles
from isotrain.trainers.online.recording import function_digests
from isotrain.trainers.start import changed_since_start, write_start


def test_a_change_is_noticed_once(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    recipe = online_recipe(tiny, tmp_path / "run", reward={"function": {"path": f"{path}:f"}})

    def start(text: str) -> list[str]:
        path.write_text(text)
        assert recipe.reward is not None
        digests = function_digests(recipe, UserFiles(reward_source(recipe.reward)))
        changed = changed_since_start(recipe, digests)
        write_start(recipe, "", {}, digests)
        return changed

    assert start("def f(response):\n    return 1\n") == []
    assert start("def f(response):\n    return 1\n") == []
    assert start("def f(response):\n    return 2\n") == ["reward.function.path"]
    assert start("def f(response):\n    return 2\n") == []


def test_the_name_counts_and_a_replay_has_none(tiny: Path, tmp_path: Path) -> None:
    a, b = (
        online_recipe(tiny, tmp_path, reward={"function": {"path": f"reward.py:{name}"}}) for name in "ab"
    )
    assert function_digests(a, UserFiles("text")) != function_digests(b, UserFiles("text"))
    assert function_digests(a, UserFiles()) == {}
