"""Weights from device to device: a run learns as it does from files."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from online_runs import OnlineRun, environment, online_recipe

from isotrain.recipe.schema import Recipe
from support import stable_metrics


def recipe(tiny: Path, output: Path, placement: str, steps: int = 3, **rollout: str) -> Recipe:
    ranks = 2 if placement == "colocated" else 1
    return online_recipe(
        tiny,
        output,
        "npu",
        device={"ranks": ranks, "determinism": "on"},
        cluster={"placement": placement},
        rollout=rollout,
        trainer={"steps": steps},
    )


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_it_learns_as_from_files(tiny: Path, tmp_path: Path, placement: str) -> None:
    """Two ranks that share their devices with two engines; one rank beside the device of an engine."""
    sent = OnlineRun(recipe(tiny, tmp_path / "sent", placement), tmp_path, "sent").finish()
    by_file = recipe(tiny, tmp_path / "read", placement, weight_transfer="file")
    read = OnlineRun(by_file, tmp_path, "read").finish()
    rows = stable_metrics(sent)
    assert len(rows) == 3 and rows == stable_metrics(read)
    assert all(row["rollout/weight_check_diff"] < 1e-4 for row in rows)


# As a driver that is too old for it.
REFUSES = """
from torch.multiprocessing import reductions
import torch_npu

def refuse(tensor):
    raise RuntimeError("aclrtIpcMemGetExportKey, error code is 207000")

reductions.reduce_tensor = refuse
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_driver_that_cannot_share_memory_costs_time_and_not_the_run(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    path = f"{tmp_path}{os.pathsep}{environment('npu')['PYTHONPATH']}"
    once = recipe(tiny, tmp_path / "run", "colocated", 1)
    run = OnlineRun(once, tmp_path, PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    run.finish()
    assert "warning: weights go through host memory, which takes longer" in run.text, run.text
    assert "error code is 207000" in run.text


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_an_engine_that_comes_too_late_for_what_was_sent(tiny: Path, tmp_path: Path, placement: str) -> None:
    """It reads a file, which the ranks write for it; the run learns the same."""
    calm = OnlineRun(recipe(tiny, tmp_path / "calm", placement, 6), tmp_path, "calm").finish()
    run = OnlineRun(recipe(tiny, tmp_path / "wild", placement, 6), tmp_path, "wild")
    try:
        run.wait_for_steps(2)
        killed = _kill_while_generating(run)
        wild = run.finish()
    finally:
        run.end()
    assert killed and "a new worker replaces it" in run.text, run.text
    assert stable_metrics(wild) == stable_metrics(calm)


def _kill_while_generating(run: OnlineRun) -> bool:
    """Ray writes the running method over a worker's command line; an update must not be hit."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.process.poll() is None:
        for pid in run.workers("RolloutWorker"):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            if command == b"ray::RolloutWorker.stream":
                os.kill(pid, signal.SIGKILL)
                return True
        time.sleep(0.001)
    return False
