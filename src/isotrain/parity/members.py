"""Members of an envelope: runs of the reference that only round differently, as devices do."""

from __future__ import annotations

from itertools import cycle, islice

from isotrain.recipe.preference import DpoSection, RmSection
from isotrain.recipe.schema import Recipe

PERTURBATION = "model.perturbation"
SPLIT = "data.tokens_per_micro_batch"
# Enough to cut the usual batch in several micro-batches.
_PARTS = 16


def member_settings(recipe: Recipe, count: int, *, ranks: bool) -> list[tuple[str, ...]]:
    """Changes to the recipe for each of so many members.

    Each starts from weights of other last digits; in turn they also compute attention otherwise, sum over
    other micro-batches and, with `ranks`, over two ranks.
    """
    data = recipe.data
    longest = data.max_length * (2 if isinstance(recipe.algorithm, DpoSection | RmSection) else 1)
    smaller = max(longest, data.tokens_per_micro_batch // _PARTS)
    split = (f"{SPLIT}={smaller}",) if smaller < data.tokens_per_micro_batch else ()
    other = "sdpa" if recipe.model.attention == "padded" else "padded"
    attention = (f"model.attention={other}",)
    if recipe.device.mesh.context > 1:  # which cannot be padded
        attention = ("device.mesh.context_attention=ring",)
    two_ranks = ("device.ranks=2",) if ranks and recipe.device.ranks == 1 else ()
    ways = cycle([(), attention, split, (*attention, *split, *two_ranks)])
    return [(f"{PERTURBATION}={number}", *way) for number, way in enumerate(islice(ways, count), start=1)]
