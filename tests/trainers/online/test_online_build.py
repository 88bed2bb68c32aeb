from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from online_runs import online_recipe

from isotrain.recipe.online import RolloutSection
from isotrain.trainers.online.build import devices_of


@pytest.mark.parametrize(
    ("placement", "rollout", "devices"),
    [
        ("separate", {"engines": 3, "tensor_parallel": 2}, 2 + 3 * 2),
        ("colocated", {"engines": 2, "tensor_parallel": 1}, 2),
        ("colocated", {}, 2),
        ("separate", {}, 2 + 1),
        ("separate", {"replay": "runs/another"}, 2),
    ],
)
def test_throughput_counts_devices_that_engines_have_to_themselves(
    tiny: Path, tmp_path: Path, placement: str, rollout: dict[str, Any], devices: int
) -> None:
    recipe = online_recipe(
        tiny,
        tmp_path,
        device={"ranks": 2},
        rollout={"engine": "vllm", "n": 4, "max_tokens": 6, **rollout},
        cluster={"placement": placement},
    )
    assert recipe.cluster is not None
    assert devices_of(recipe, recipe.cluster) == devices


@pytest.mark.parametrize(
    ("placement", "free", "rollout", "engines"),
    [
        ("colocated", 0, {}, 8),
        ("colocated", 5, {"tensor_parallel": 2}, 4),
        ("colocated", 0, {"tensor_parallel": 3}, 2),
        ("colocated", 0, {"engines": 1}, 1),
        ("separate", 8, {}, 8),
        ("separate", 7, {"tensor_parallel": 2}, 3),
        ("separate", 0, {}, 1),  # a cluster that is too small says so itself
        ("separate", -3, {"tensor_parallel": 2}, 1),
        ("separate", 8, {"engines": 2}, 2),
    ],
)
def test_engines_take_the_devices_that_there_are(
    placement: str, free: int, rollout: dict[str, Any], engines: int
) -> None:
    assert RolloutSection(**rollout).engine_count(8, placement, free) == engines
