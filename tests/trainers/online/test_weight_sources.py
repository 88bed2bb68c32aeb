"""Where each engine finds new weights: with a rank of its own machine, or else with a relay."""

from __future__ import annotations

from typing import Any

import pytest

from isotrain.cluster.placement import Placement, Seat
from isotrain.errors import WeightUpdateError
from isotrain.rollout.base import WeightUpdate, update_limit
from isotrain.trainers.online.weights import Relays, Source, relay_members, weight_sources


def seats(nodes: str) -> tuple[Seat, ...]:
    anything: Any = None
    return tuple(Seat(anything, 0, node, node, ()) for node in nodes)


@pytest.mark.parametrize(
    ("ranks", "engines", "sources", "relays"),
    [
        ("aabb", "aabb", [Source(0), Source(0), Source(2), Source(2)], ""),
        ("aabb", "bb", [Source(2), Source(2)], ""),
        ("aa", "bcb", [Source(0, 0), Source(0, 1), Source(0, 0)], "bc"),
        ("aab", "bc", [Source(2), Source(0, 0)], "c"),
        ("a", "a", [Source(0)], ""),
    ],
)
def test_sources(ranks: str, engines: str, sources: list[Source], relays: str) -> None:
    placement = Placement(seats(ranks), seats(engines))
    assert weight_sources(placement) == sources
    assert [member.seat.node for member in relay_members(placement, {}) if member.seat] == list(relays)


def published(*digests: str | None) -> list[WeightUpdate | None]:
    return [
        None if digest is None else WeightUpdate(3, f"file {rank}", 1, 8, digest)
        for rank, digest in enumerate(digests)
    ]


def test_each_engine_reads_the_file_of_its_own_machine() -> None:
    nobody: Any = []
    relays = Relays(nobody, nobody, [Source(2), Source(0)], "")
    assert [update.address for update in relays.spread(published("x", None, "x"), 1.0)] == [
        "file 2",
        "file 0",
    ]


def test_copies_that_differ_are_found() -> None:
    nobody: Any = []
    relays = Relays(nobody, nobody, [Source(1), Source(0)], "")
    with pytest.raises(WeightUpdateError, match="ranks 0, 1 gathered 2 different copies of the weights"):
        relays.spread(published("x", "y"), 1.0)


def test_large_models_have_longer() -> None:
    assert update_limit(300.0, 0) == 300.0
    assert update_limit(300.0, 141 * 10**9) == 1710.0  # 70B in bfloat16
