"""Runs of the real trainer for tests, in this process or as a user starts them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import npusim
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from isotrain.observe.metrics import read_metrics
from isotrain.recipe.schema import Recipe

# Metrics that depend on the clock or the allocator; all others must be the same in every rerun.
VOLATILE = ("timing_s/", "perf/")


# `ISOTRAIN_TEST_FUSED=on pytest -k npu ...` runs the simulated npu's tests over its fused operators.
FUSED_VARIABLE = "ISOTRAIN_TEST_FUSED"


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def how_computed(device_type: str) -> dict[str, Any]:
    """Settings of `model` that the environment asks for on this device."""
    return {"fused": os.environ.get(FUSED_VARIABLE, "off")} if device_type == "npu" else {}


def tiny_recipe(tiny: Path, output: Path, device_type: str, **sections: dict[str, Any]) -> Recipe:
    """A short float32 run on the tiny model; `sections` are merged over it."""
    base: dict[str, Any] = {
        "name": "test",
        "output": str(output),
        "device": {"type": device_type},
        "model": {"path": str(tiny / "model"), "dtype": "float32", **how_computed(device_type)},
        "data": {
            "train": str(tiny / "train.jsonl"),
            "batch_size": 8,
            "max_length": 128,
            "tokens_per_micro_batch": 512,
        },
        "algorithm": {"name": "sft"},
        "optimizer": {"lr": 3e-3},
        "trainer": {"steps": 6},
        "observe": {"loggers": []},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return Recipe.model_validate(base)


def python_of(environment: str) -> str:
    """The Python of an environment of `.ci/setup`: packages that do not go with those of the tests."""
    variable = f"ISOTRAIN_{environment.upper()}_PYTHON"
    python = os.environ.get(variable) or str(Path(__file__).parents[1] / f".venv-{environment}/bin/python")
    if not Path(python).is_file():
        pytest.skip(f"run .ci/setup {environment}, or set {variable} to a Python with its packages")
    return python


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "isotrain.cli.main", *arguments]


def run_cli(
    *arguments: str, timeout: float = 540, check: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The command line in a fresh process that can see the simulated accelerator."""
    done = subprocess.run(
        command(*arguments),
        env={**npusim.environment(), **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def write_recipe(recipe: Recipe, path: Path) -> Path:
    path.write_text(recipe.model_dump_json())  # JSON is YAML
    return path


def stable_metrics(run: Path | str) -> list[dict[str, float]]:
    """A run's metrics without those that no two runs share."""
    rows = read_metrics(Path(run) / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(VOLATILE)} for row in rows]


@contextmanager
def rank_of_two(rank: int) -> Iterator[DeviceMesh]:
    """A mesh as one of two ranks sees it, without the other."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        # A name of its own: torch keeps what it knows of a mesh for the next equal one in the process.
        yield init_device_mesh("cpu", (2,), mesh_dim_names=(f"seen_by_{rank}",))
    finally:
        dist.destroy_process_group()
