"""Where ranks meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import isotrain
from isotrain.device.cpu import Cpu
from isotrain.engine.world import join_world, open_store


def test_the_place_where_a_single_rank_met_nobody_is_removed(tmp_path: Path) -> None:
    store = open_store(None, str(tmp_path))
    with join_world(Cpu(), store) as world:
        assert world.size == 1 and Path(store).exists()
    assert not any(tmp_path.iterdir())


@pytest.mark.ranks
@pytest.mark.parametrize(("on_demand_from", "most"), [(9, 8), (8, 6)])
def test_connections_of_many_ranks(on_demand_from: int, most: int) -> None:
    """Seven connections each and gloo's own sockets, or those with the neighbours; files up to the limit."""
    unset = ("TORCH_GLOO_LAZY_INIT", "RANK", "WORLD_SIZE", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("many_ranks.py")), str(on_demand_from)],
        env={**environment, "PYTHONPATH": str(Path(isotrain.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = json.loads(done.stdout.splitlines()[-1])
    assert all(rank["total"] == 8.0 and rank["soft"] == 512 for rank in ranks)
    sockets = [rank["sockets"] for rank in ranks]
    assert max(sockets) <= most and (min(sockets) >= 7) == (on_demand_from == 9), sockets
