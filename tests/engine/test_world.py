"""Where ranks meet."""

from __future__ import annotations

from pathlib import Path

from isotrain.device.cpu import Cpu
from isotrain.engine.world import join_world, open_store


def test_the_place_where_a_single_rank_met_nobody_is_removed(tmp_path: Path) -> None:
    store = open_store(None, str(tmp_path))
    with join_world(Cpu(), store) as world:
        assert world.size == 1 and Path(store).exists()
    assert not any(tmp_path.iterdir())
