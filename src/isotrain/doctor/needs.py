"""What a recipe asks of a machine."""

from __future__ import annotations

from isotrain.recipe.online import ClusterSection
from isotrain.recipe.schema import Recipe

NEEDS = (
    "online",
    "vllm",
    "sglang",
    "sleep",
    "a given Ray cluster",
    "several ranks",
    "flash",
    "float32",
)


def needs_of(recipe: Recipe) -> frozenset[str]:
    """Those of `NEEDS` that a recipe has."""
    rollout, cluster = recipe.rollout, recipe.cluster or ClusterSection()
    engine = rollout.engine if rollout else None
    has = {
        "online": rollout is not None,
        "vllm": engine == "vllm",
        "sglang": engine == "sglang",
        "sleep": engine in ("vllm", "sglang") and cluster.placement == "colocated",
        "a given Ray cluster": rollout is not None and cluster.address not in ("auto", "local"),
        "several ranks": recipe.device.ranks > 1 or (rollout is not None and rollout.tensor_parallel > 1),
        "flash": recipe.model.attention in ("auto", "flash") and recipe.model.dtype == "bfloat16",
        "float32": recipe.model.dtype == "float32",
    }
    assert set(has) == set(NEEDS)
    return frozenset(name for name, needed in has.items() if needed)
