"""Runs with weight updates in flight: never too old, each draw learnt from once, deaths and resampling."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from online_runs import OnlineRun, drawn, online_recipe, run_online, workers_below

from isotrain.cluster.private import SYSTEM_CONFIG
from isotrain.data.record import read_trajectories
from isotrain.data.trajectory import Trajectory
from isotrain.observe.metrics import read_metrics
from isotrain.recipe.schema import Recipe
from ray_machines import two_machines

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]

STEPS, BATCH, N, STALENESS = 8, 4, 4, 2


OFTEN_EQUAL = """
def score(response):
    return float(len(response) % 3 == 0)
"""


@pytest.fixture(scope="module")
def three_cores() -> Iterator[str]:
    """The address of a cluster with a place for a rank and two engines, whatever this machine has."""
    own = {"object_store_memory": 200 << 20, "_system_config": SYSTEM_CONFIG}
    with two_machines(cpus=3, count=1, **own) as cluster:
        yield cluster.address


def in_flight(
    tiny: Path, output: Path, address: str, steps: int = STEPS, **sections: dict[str, Any]
) -> Recipe:
    given: dict[str, dict[str, Any]] = {
        "rollout": {
            "engine": "hf",
            "n": N,
            "max_tokens": 64,
            "record": True,
            "staleness": STALENESS,
            "in_flight": True,
            "engines": 2,
        },
        "cluster": {"address": address, "placement": "separate"},
        "trainer": {"steps": steps, "save_every": 100},
    }
    for section, values in sections.items():
        given[section] = given.get(section, {}) | values
    return online_recipe(tiny, output, **given)


def check(run: Path, steps: int = STEPS) -> list[Trajectory]:
    """No token is too old, and the metrics say how old they are; returns all that was learnt from."""
    rows, learnt = read_metrics(run / "metrics.jsonl"), []
    assert [row["step"] for row in rows if "critic/score/mean" in row] == list(range(1, steps + 1))
    for row in rows:
        step = row["step"]
        (file,) = (run / "trajectories").glob(f"step-{step:06d}-*.parquet")
        found = [record.trajectory for record in read_trajectories(file)]
        ages_T = np.concatenate([step - 1 - trajectory.version_N for trajectory in found])
        assert ages_T.min() >= 0 and ages_T.max() <= STALENESS, f"step {step}"
        assert row["rollout/staleness/max"] == ages_T.max()
        assert row["rollout/staleness/token_mean"] == pytest.approx(ages_T.mean())
        for trajectory in found:
            assert (np.diff(trajectory.version_N) >= 0).all()
        learnt += found
    return learnt


def updated_in_flight(learnt: list[Trajectory]) -> int:
    return sum(len(np.unique(trajectory.version_N)) > 1 for trajectory in learnt)


def test_a_run_over_two_engines(tiny: Path, tmp_path: Path, three_cores: str) -> None:
    run = run_online(in_flight(tiny, tmp_path / "run", three_cores), tmp_path, timeout=600)
    learnt = check(run)
    assert any(len(np.unique(trajectory.version_N)) > 1 for trajectory in learnt), (
        "none was updated in flight"
    )
    wanted = [
        [(place, sample) for place in range(first, first + BATCH) for sample in range(N)]
        for first in range(0, STEPS * BATCH, BATCH)
    ]
    assert [[(place, sample) for place, _, sample in step] for step in drawn(run)] == wanted


@pytest.mark.slow
def test_killed_engines_are_replaced(tiny: Path, tmp_path: Path, three_cores: str) -> None:
    run = OnlineRun(in_flight(tiny, tmp_path / "run", three_cores, steps=100_000), tmp_path)
    try:
        run.wait_for_trained(2)
        for _ in range(3):
            os.kill(workers_below(os.getpid(), "RolloutWorker")[0], signal.SIGKILL)
            run.wait_for_trained(run.trained() + 4)
        assert run.text.count("a new worker replaces it") == 3, run.text
    finally:
        run.end()
    steps = [step for step in drawn(tmp_path / "run") if len(step) == BATCH * N]
    learnt = [(place, sample) for step in steps for place, _, sample in step]
    assert learnt == [(place, sample) for place in range(len(steps) * BATCH) for sample in range(N)]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert max(row["rollout/staleness/max"] for row in rows) <= STALENESS


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [{"name": "grpo", "dynamic_sampling": {"max_attempts": 2}}, {"name": "remax"}]
)
def test_resampling_greedy_responses_and_validation(
    tiny: Path, tmp_path: Path, three_cores: str, algorithm: dict[str, Any]
) -> None:
    """What needs responses beside the batches, some of them with another sampling."""
    reward = tmp_path / "reward.py"
    reward.write_text(OFTEN_EQUAL)
    sections = {
        "reward": {"function": {"path": f"{reward}:score"}},
        "algorithm": algorithm,
        "data": {"validation": str(tiny / "prompts.jsonl"), "validation_rows": 4},
        "trainer": {"validate_every": 2},
    }
    run = run_online(in_flight(tiny, tmp_path / "run", three_cores, **sections), tmp_path, timeout=900)
    check(run)
    learnt = [(place, sample) for step in drawn(run) for place, _, sample in step]
    assert learnt == sorted(set(learnt)) and len(learnt) == STEPS * BATCH * N
    rows = read_metrics(run / "metrics.jsonl")
    assert sum(any(name.startswith("val-core/") for name in row) for row in rows) == STEPS // 2
    assert any(row["rollout/resampled"] for row in rows) == ("dynamic_sampling" in algorithm)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_run_with_vllm(tiny: Path, tmp_path: Path, three_cores: str) -> None:
    recipe = in_flight(tiny, tmp_path / "run", three_cores, rollout={"engine": "vllm", "kv_cache_gb": 0.25})
    run = run_online(recipe, tmp_path, timeout=900)
    learnt = check(run)
    assert any(len(np.unique(trajectory.version_N)) > 1 for trajectory in learnt), (
        "none was updated in flight"
    )
    rows = read_metrics(run / "metrics.jsonl")
    assert max(row["rollout/weight_check_diff"] for row in rows) <= 1e-4
