"""Ranks wait for work on data longer than a collective may take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

RANK = """
import os, sys, time
from pathlib import Path
from datetime import timedelta
from isotrain.device.detect import choose_device
from isotrain.engine import world as module
module.COLLECTIVE_TIMEOUT = timedelta(seconds=8)
from isotrain.errors import DataError

def work():
    if world.rank == 0:
        time.sleep(12)
        if sys.argv[1] == "fails":
            raise DataError("a:3: broken")
    return world.rank

# On a busy machine ranks start further apart than the limit of this test.
place = Path(os.environ["ISOTRAIN_STORE"]).parent
(place / os.environ["RANK"]).touch()
while not all((place / rank).exists() for rank in "01"):
    time.sleep(0.05)
with module.join_world(choose_device("cpu")) as world:
    world.barrier()
    print(world.machine_first("data.train", work), flush=True)
    world.barrier()
"""


@pytest.mark.parametrize("case", [pytest.param("is slow", marks=pytest.mark.slow), "fails"])
def test_the_first_rank_may_take_its_time(tmp_path: Path, case: str) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        return subprocess.Popen(
            [sys.executable, "-c", RANK, case],
            env={**os.environ, **place, "ISOTRAIN_STORE": str(tmp_path / "store")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    ranks = [start(rank) for rank in range(2)]
    said = [rank.communicate() for rank in ranks]
    if case == "fails":
        assert all("a:3: broken" in error for _, error in said), "each rank tells why"
        assert all(rank.returncode for rank in ranks)
    else:
        assert [(out.strip(), rank.returncode) for (out, _), rank in zip(said, ranks, strict=True)] == [
            ("0", 0),
            ("1", 0),
        ], said
