"""What a recipe asks of a machine."""

from __future__ import annotations

from collections.abc import Callable

from isotrain.recipe.online import ClusterSection
from isotrain.recipe.schema import Recipe


def _engine(recipe: Recipe) -> str | None:
    return recipe.rollout.engine if recipe.rollout and recipe.rollout.generates else None


def _cluster(recipe: Recipe) -> ClusterSection:
    return recipe.cluster or ClusterSection()


# By the names under which rules ask for them.
NEEDS: dict[str, Callable[[Recipe], bool]] = {
    "online": lambda recipe: recipe.rollout is not None,
    "vllm": lambda recipe: _engine(recipe) == "vllm",
    "sglang": lambda recipe: _engine(recipe) == "sglang",
    "sleep": lambda recipe: (
        _engine(recipe) in ("vllm", "sglang") and _cluster(recipe).placement == "colocated"
    ),
    "a given Ray cluster": lambda recipe: (
        recipe.rollout is not None and _cluster(recipe).address not in ("auto", "local")
    ),
    "several ranks": lambda recipe: (
        recipe.device.ranks > 1 or (recipe.rollout is not None and recipe.rollout.tensor_parallel > 1)
    ),
    "flash": lambda recipe: recipe.model.attention in ("auto", "flash") and recipe.model.dtype == "bfloat16",
    "float32": lambda recipe: recipe.model.dtype == "float32",
}


def needs_of(recipe: Recipe) -> frozenset[str]:
    """Those of `NEEDS` that a recipe has."""
    return frozenset(name for name, has in NEEDS.items() if has(recipe))
