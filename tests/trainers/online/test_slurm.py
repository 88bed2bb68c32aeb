"""deploy/slurm.sh with stand-ins for Slurm: two Ray nodes on this machine, then a run over both."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from online_runs import environment, online_recipe

from isotrain.observe.metrics import read_metrics
from support import write_recipe

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).parents[3] / "deploy/slurm.sh"

# What srun does with a command on another machine, on this one; each node has one processor.
SRUN = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
while [[ "$1" == --* ]]; do shift; done
if [ "$1" = hostname ]; then echo "::1 127.0.0.1"; exit; fi
exec "$@" --num-cpus=1 --object-store-memory=209715200
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node[1-2]" ] && printf 'node1\\nnode2\\n'
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a batch script."""
    programs = tmp_path / "bin"
    programs.mkdir()
    modules = {"ray": "ray.scripts.scripts", "isotrain": "isotrain.cli.main"}
    texts = {"srun": SRUN, "scontrol": SCONTROL}
    texts |= {
        name: f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n' for name, module in modules.items()
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as ray_files:
        yield {
            **environment(),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(home),
            "CALLS": str(tmp_path / "calls"),
            "RAY_TMPDIR": ray_files,
            "RAY_PORT": str(free_port()),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_CPUS_ON_NODE": "1",
        }


def recipe_of_two_ranks(tiny: Path, output: Path, steps: int) -> Path:
    recipe = online_recipe(tiny, output, device={"type": "cpu", "ranks": 2}, trainer={"steps": steps})
    return write_recipe(recipe, output.with_suffix(".yaml"))


def left_of(slurm: dict[str, str]) -> list[str]:
    """The token, and processes of its cluster."""
    files = [str(path) for path in Path(slurm["HOME"]).glob(".isotrain-ray-*")]
    found = subprocess.run(["pgrep", "-f", slurm["RAY_TMPDIR"]], capture_output=True, text=True).stdout
    return files + found.split()


def test_a_run_over_the_nodes_of_a_job(tiny: Path, tmp_path: Path, slurm: dict[str, str]) -> None:
    recipe = recipe_of_two_ranks(tiny, tmp_path / "run", 2)
    done = subprocess.run(
        ["bash", str(SCRIPT), str(recipe)], env=slurm, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(read_metrics(tmp_path / "run/metrics.jsonl")) == 2
    calls = Path(slurm["CALLS"]).read_text().splitlines()
    assert ["--nodelist=node1" in call for call in calls] == [True, True, False]
    assert "--head" in calls[1] and "--nodelist=node2 ray start --address=127.0.0.1:" in calls[2]
    assert left_of(slurm) == []


def test_the_time_limit_ends_it_with_a_checkpoint(tiny: Path, tmp_path: Path, slurm: dict[str, str]) -> None:
    recipe = recipe_of_two_ranks(tiny, tmp_path / "run", 500)
    script = subprocess.Popen(["bash", str(SCRIPT), str(recipe)], env=slurm)
    deadline = time.monotonic() + 400
    metrics = tmp_path / "run/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert script.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)
    script.send_signal(signal.SIGTERM)
    assert script.wait(timeout=200) == 143
    assert list((tmp_path / "run/checkpoints").glob("step*"))
    assert left_of(slurm) == []
