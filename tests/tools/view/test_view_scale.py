"""100,000 recorded trajectories: how long each request takes, and how much memory the server."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from pathlib import Path

import npusim
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from view_runs import make_run, response

from isotrain.data.record import step_file, write_trajectories
from support import command

STEPS, RANKS, ROWS = 25, 4, 1000
SECONDS, MEGABYTES = 2.0, 500


def write_many(run: Path) -> None:
    """All files have the same tokens; draws, rewards and the order of lengths differ."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(20, 600, ROWS)
    first = step_file(run / "trajectories", 1, 0)
    write_trajectories(
        first,
        [
            response(draw.integers(0, 400, n).tolist(), [9] * 80, logp=-draw.random(n), sample=i % 8)
            for i, n in enumerate(lengths)
        ],
        RANKS,
    )
    table = pyarrow.parquet.read_table(first)
    for step in range(1, STEPS + 1):
        for rank in range(RANKS):
            start = ((step - 1) * RANKS + rank) * (ROWS // 8)
            columns = {
                "prompt_index": pyarrow.array(start + np.arange(ROWS) // 8),
                "reward": pyarrow.array(draw.random(ROWS)),
            }
            for name, values in columns.items():
                field = table.schema.field(name)
                table = table.set_column(table.schema.get_field_index(name), field, values)
            path = step_file(run / "trajectories", step, rank)
            pyarrow.parquet.write_table(
                table, path, compression="zstd", use_dictionary=False, row_group_size=1024
            )


def peak_megabytes(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


@pytest.mark.heavy
def test_shows_a_hundred_thousand_trajectories_in_time(tiny: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny / "model")
    write_many(run)
    process = subprocess.Popen(
        command("view", str(run), "--no-open"), env=npusim.environment(), stdout=subprocess.PIPE, text=True
    )
    slowest: dict[str, float] = {}

    def get(query: str) -> dict[str, object]:
        started = time.monotonic()
        with urllib.request.urlopen(f"{address}api/{query}", timeout=60) as reply:
            content: dict[str, object] = json.loads(reply.read())
        slowest[query] = max(slowest.get(query, 0.0), time.monotonic() - started)
        return content

    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        started = time.monotonic()
        while True:
            (state,) = get("state")["runs"]  # type: ignore[misc]
            # Also while files are being read.
            get("rows?run=0&sort=reward&limit=200")
            if state["trajectories"]["rows"] == STEPS * RANKS * ROWS and not state["trajectories"]["pending"]:
                break
            assert time.monotonic() - started < 120
            time.sleep(0.2)
        read = time.monotonic() - started
        for sort in ("step", "reward", "length", "version", "failure", "advantage"):
            get(f"rows?run=0&sort={sort}&order=up&offset=99000&limit=200")
        get("rows?run=0&where=reward:lt:0.001&where=length:gt:300&where=source:eq:data&sort=length")
        for step, rank, index in ((1, 0, 0), (25, 3, 999), (13, 2, 500)):
            episode = get(f"episode?run=0&step={step}&rank={rank}&index={index}")
            get(f"group?run=0&step={step}&prompt_index={episode['prompt_index']}")
        memory = peak_megabytes(process.pid)
    finally:
        process.kill()
        process.wait()
    worst = max(slowest, key=lambda query: slowest[query])
    print(f"index {read:.1f} s, slowest {worst} {slowest[worst]:.2f} s, peak {memory:.0f} MB")
    assert slowest[worst] < SECONDS, worst
    assert memory < MEGABYTES
