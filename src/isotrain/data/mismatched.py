"""For each item, another item with the response to a different prompt."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isotrain.errors import DataError

Numbers = npt.NDArray[np.int64]


def donors(prompt_ids: Numbers) -> Numbers:
    """Which item gives its response to each prompt; it depends on the order of the items alone.

    Items of one prompt count as one group, wherever they are. The first of a group takes the response that
    follows the group, the second the next, and so on past all other groups: responses are used evenly.
    """
    count = len(prompt_ids)
    _, first, group = np.unique(prompt_ids, return_index=True, return_inverse=True)
    if len(first) < 2:
        raise DataError(
            f"all {count} responses belong to one prompt, but KTO's reference point needs at least two "
            "prompts; add rows of a second prompt"
        )
    order = np.argsort(first[group], kind="stable")  # groups by first appearance, each in its own order
    sizes = np.bincount(group)[group[order]]
    starts = np.searchsorted(first[group][order], first[group][order])
    rank = np.arange(count) - starts
    found = np.empty(count, np.int64)
    found[order] = order[(starts + sizes + rank % (count - sizes)) % count]
    return found
