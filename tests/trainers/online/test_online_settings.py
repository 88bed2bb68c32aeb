"""What of a recipe's algorithm reaches the maths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isotrain.algorithms.kl import AdaptiveKl, FixedKl
from isotrain.recipe.schema import Recipe
from isotrain.trainers.online.build import kl_controller, prompt_sampler
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


@pytest.mark.parametrize(
    ("trainer", "algorithm", "drawn"),
    [
        ({"epochs": 3}, {}, 15),
        ({"epochs": 1}, {}, 5),
        ({"epochs": 1, "steps": 8}, {}, 16),
        # Draws are replaced by others: epochs would end before the last step.
        ({"epochs": 1}, {"dynamic_sampling": {"max_attempts": 2}}, 16),
    ],
)
def test_prompts_end_with_the_epochs_unless_steps_are_given(
    trainer: dict[str, int], algorithm: dict[str, Any], drawn: int
) -> None:
    settings = recipe(name="grpo", **algorithm).model_dump(exclude_unset=True)
    data = {**settings["data"], "batch_size": 2}
    chosen = Recipe.model_validate({**settings, "trainer": trainer, "data": data})
    sampler = prompt_sampler(chosen, rows=5, taken=0)
    assert sum(len(sampler.next_batch()) for _ in range(8)) == drawn


def test_builds_the_controller_of_kl() -> None:
    adaptive = {"place": "reward", "controller": "adaptive", "target": 0.2, "horizon": 900}
    algorithm: Any = recipe(name="grpo", kl=adaptive).algorithm
    assert kl_controller(algorithm.kl, 0.5) == AdaptiveKl(0.5, 0.2, 900)
    algorithm = recipe(name="grpo").algorithm
    assert kl_controller(algorithm.kl, 0.5) == FixedKl(0.5)


@pytest.mark.parametrize(
    ("critic", "aggregation"),
    [({"aggregation": "seq-mean-token-mean"}, "seq-mean-token-mean"), ({}, "token-mean")],
)
def test_the_critic_has_its_own_aggregation(critic: dict[str, str], aggregation: str) -> None:
    chosen = recipe(name="ppo", critic=critic, loss={"aggregation": "token-mean"})
    algorithm: Any = chosen.algorithm
    assert update_settings(chosen, algorithm).critic_aggregation == aggregation
