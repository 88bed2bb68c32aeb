"""What the guide shows is what the program does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isotrain.errors import RecipeError
from isotrain.recipe.load import parse_recipe
from isotrain.recipe.names import nearest
from isotrain.recipe.schema import Recipe

GUIDE = (Path(__file__).parents[2] / "docs" / "recipe.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


def test_the_minimal_recipe_is_valid_and_minimal() -> None:
    minimal = blocks("yaml")[0]
    parse_recipe(minimal, "my.yaml")
    for line in minimal.splitlines():
        if not line.endswith(":"):
            with pytest.raises(RecipeError):
                parse_recipe(minimal.replace(line, ""), "my.yaml")


def test_the_online_recipe_and_its_overrides_are_valid() -> None:
    overrides = ["rollout.n=4", "reward.gsm8k.method=flexible", "algorithm.name=rloo"]
    overrides += ["reward.math={}", "reward.gsm8k=null"]
    assert all(override in GUIDE for override in overrides)
    recipe = parse_recipe(blocks("yaml")[1], "my.yaml", overrides)
    assert recipe.algorithm.name == "rloo" and recipe.reward is not None and recipe.reward.math is not None


def test_names_of_other_trainers_lead_where_the_guide_says() -> None:
    for name in ("actor_rollout_ref.rollout.n", "n_samples_per_prompt", "num_generations"):
        assert f"`{name}`" in GUIDE and nearest(name, Recipe) == "rollout.n"


def test_the_errors_are_the_real_ones() -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(blocks("yaml")[2], "my.yaml", ["trainer.epochs=2.5"])
    assert str(error.value) == blocks("text")[0].strip()


def test_the_overrides_are_valid() -> None:
    overrides = ["optimizer.lr=1e-4", "model.lora.rank=16", "model.lora.targets=[q_proj, v_proj]"]
    overrides += ["trainer.steps=null", 'observe.project=""', "model.lora={rank: 8}", "device.type=cpu"]
    assert all(override in GUIDE for override in overrides)
    parse_recipe(blocks("yaml")[0], "my.yaml", overrides)
