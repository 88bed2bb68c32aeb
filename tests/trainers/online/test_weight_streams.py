"""Weights from device to device: a run learns as it does from files."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from online_runs import OnlineRun, environment, online_recipe

from isotrain.observe.metrics import read_metrics
from isotrain.recipe.schema import Recipe
from support import stable_metrics


def recipe(tiny: Path, output: Path, placement: str, steps: int = 3, **rollout: Any) -> Recipe:
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


def ahead(tiny: Path, output: Path, steps: int, in_flight: bool, **rollout: Any) -> Recipe:
    """Two engines beside a rank, which learns while they generate."""
    more: dict[str, Any] = {
        "staleness": 1,
        "in_flight": in_flight,
        "max_tokens": 24,
        "record": True,
        **rollout,
    }
    return recipe(tiny, output, "separate", steps, **more)


def start_of(run: Path) -> Any:
    return json.loads((run / "environment.json").read_text())["starts"][-1]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("in_flight", [False, True])
def test_engines_take_weights_while_they_generate(tiny: Path, tmp_path: Path, in_flight: bool) -> None:
    run = OnlineRun(ahead(tiny, tmp_path / "run", 8, in_flight), tmp_path)
    rows = stable_metrics(run.finish())
    assert "weights by broadcast to a second buffer" in run.text, run.text
    assert "warning: weight" not in run.text, run.text
    assert len(rows) == 8 and all(row["rollout/weight_check_diff"] < 1e-4 for row in rows)
    assert {row["rollout/staleness/max"] for row in rows} <= {0.0, 1.0}
    versions = {row["rollout/version"] for row in rows}
    assert versions == set(map(float, range(1, 9)))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("in_flight", [False, True])
def test_killed_engines_get_the_newest_weights(tiny: Path, tmp_path: Path, in_flight: bool) -> None:
    """At any moment, in an update or not: nothing that was sent can be found again."""
    run = OnlineRun(ahead(tiny, tmp_path / "run", 100_000, in_flight), tmp_path)
    try:
        run.wait_for_trained(2)
        for _ in range(4):
            os.kill(run.workers("RolloutWorker")[0], signal.SIGKILL)
            run.wait_for_trained(run.trained() + 3)
        assert run.text.count("a new worker replaces it") == 4, run.text
    finally:
        run.end()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {row["rollout/staleness/max"] for row in rows} <= {0.0, 1.0}
    assert all(row["rollout/weight_check_diff"] < 1e-4 for row in rows)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_room_for_a_second_buffer_weights_go_through_files(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FULL)
    path = f"{tmp_path}{os.pathsep}{environment('npu')['PYTHONPATH']}"
    run = OnlineRun(ahead(tiny, tmp_path / "run", 2, False), tmp_path, PYTHONPATH=path)
    run.finish()
    assert "warning: weights go through host memory, which takes longer" in run.text, run.text
    assert "no room for a second buffer of" in run.text and "weights by file" in run.text, run.text


# As a device that is full: nothing else makes a tensor of bytes with `empty` at once.
FULL = """
import torch

empty = torch.empty

def full(*size, **options):
    if options.get("dtype") is torch.uint8 and options.get("device") is not None and size[0] > 1 << 18:
        raise torch.OutOfMemoryError("NPU out of memory")
    return empty(*size, **options)

torch.empty = full
"""

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
