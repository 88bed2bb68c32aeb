"""What of a recipe's algorithm reaches the maths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isotrain.recipe.schema import Recipe
from isotrain.trainers.online.build_rank import advantage_settings, update_settings

REWARDS_R, GROUP_R = torch.tensor([0.0, 1e-4, 5.0]), torch.tensor([0, 0, 1])
REWARDS_N, MASK_N = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([True, False, True])


def recipe(**algorithm: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "a",
            "output": "b",
            "model": {"path": "c"},
            "data": {"train": "d"},
            "algorithm": algorithm,
            "rollout": {"n": 2, "max_tokens": 7},
            "reward": {"math": {}},
        }
    )


def advantages(name: str, convention: str) -> list[float]:
    discount = {"gamma": 0.5} if name in ("ppo", "reinforce++") else {}
    algorithm: Any = recipe(name=name, convention=convention, **discount).algorithm
    found = advantage_settings(algorithm)
    if found.estimator.per == "trajectory":
        result: torch.Tensor = found.estimator.function(REWARDS_R, GROUP_R, **found.options)
        return result.tolist()
    further = [torch.tensor([1.0, 2.0, 3.0])] if name == "ppo" else []
    result, _ = found.estimator.function(REWARDS_N, MASK_N, [3], *further, **found.options)
    return result.tolist()


@pytest.mark.parametrize(
    ("name", "conventions"),
    [
        ("grpo", ["verl", "openrlhf", "trl"]),
        ("rloo", ["verl", "trl"]),
        ("ppo", ["verl", "openrlhf"]),
        ("reinforce++", ["verl", "openrlhf"]),
        ("reinforce++-baseline", ["verl", "openrlhf"]),
    ],
)
def test_the_convention_reaches_the_advantages(name: str, conventions: list[str]) -> None:
    results = [advantages(name, convention) for convention in conventions]
    assert all(one != other for i, one in enumerate(results) for other in results[:i]), results


def test_the_convention_reaches_whitening_and_dual_clip() -> None:
    for convention, dual_clip in {"verl": 3.0, "openrlhf": None}.items():
        found = recipe(name="ppo", convention=convention)
        algorithm: Any = found.algorithm
        assert advantage_settings(algorithm).whitening == convention
        assert update_settings(found, algorithm).loss_options["dual_clip"] == dual_clip


def test_the_longest_response_is_the_horizon_of_dr_grpo() -> None:
    found = recipe(name="grpo", loss={"aggregation": "seq-mean-token-sum-norm"})
    algorithm: Any = found.algorithm
    assert update_settings(found, algorithm).horizon == 7
