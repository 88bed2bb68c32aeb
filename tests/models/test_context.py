from __future__ import annotations

import pytest

from isotrain.errors import ModelError
from isotrain.models.context import head_ranks


@pytest.mark.parametrize(
    ("size", "query_heads", "key_heads", "kind", "ranks"),
    [
        (4, 32, 8, "auto", 4),
        (16, 32, 8, "auto", 16),  # two ranks share each key/value head
        (4, 14, 2, "auto", 2),  # Qwen2.5-0.5B: rings of two
        (6, 4, 2, "auto", 2),
        (3, 14, 2, "auto", 1),
        (4, 32, 8, "ulysses", 4),
        (4, 32, 8, "ring", 1),
    ],
)
def test_heads_are_split_as_far_as_they_go(
    size: int, query_heads: int, key_heads: int, kind: str, ranks: int
) -> None:
    assert head_ranks(size, query_heads, key_heads, kind) == ranks


def test_heads_that_cannot_be_split_are_an_error() -> None:
    with pytest.raises(ModelError, match=r"14 query and 2 key/value heads .* 4 ranks; set .*context to 2"):
        head_ranks(4, 14, 2, "ulysses")
