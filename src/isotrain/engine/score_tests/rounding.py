"""Numbers as a shorter type keeps them."""

from __future__ import annotations

import numpy as np

from isotrain.engine.score_tests.fit import Array


def rounded(numbers: Array, dtype: str) -> Array:
    """To the nearest of `dtype`, ties to even."""
    if dtype == "float32":
        return numbers.astype(np.float32).astype(np.float64)
    if dtype == "float16":
        return numbers.astype(np.float16).astype(np.float64)
    if dtype == "bfloat16":
        # numpy has none: the upper half of a float32, after half of its last digit was added.
        bits = numbers.astype(np.float32).view(np.uint32)
        bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        short: Array = (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
        return short
    return numbers
