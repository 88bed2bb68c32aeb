"""Batches made ahead of training: never too old, each draw learnt from once, and errors end the run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from online_runs import OnlineRun, drawn, online_recipe, resumed, run_online

from isotrain.data.record import read_trajectories
from isotrain.errors import RETRYABLE
from isotrain.observe.metrics import read_metrics
from isotrain.recipe.schema import Recipe

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, BATCH, N = 8, 4, 4

# It scores two batches and ends its process; a new one cannot import it any more.
BREAKS = """
import os
from pathlib import Path

NOTE = Path({note!r})
if NOTE.exists():
    raise ValueError("this reward is broken for good")
calls = 0

def score(response):
    global calls
    calls += 1
    if calls > 32:
        NOTE.touch()
        os._exit(1)
    return len(response) / 100
"""


def ahead(tiny: Path, output: Path, steps: int = STEPS, **sections: dict[str, Any]) -> Recipe:
    given: dict[str, dict[str, Any]] = {
        "rollout": {"engine": "hf", "n": N, "max_tokens": 6, "record": True, "staleness": 1},
        "cluster": {"address": "local", "placement": "separate"},
        "trainer": {"steps": steps, "save_every": 1},
    }
    return online_recipe(tiny, output, **given, **sections)


def check(run: Path) -> None:
    """Each step learns from the next draws, answered by weights of the step or the one before."""
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for number, row in enumerate(rows, start=1):
        (file,) = (run / "trajectories").glob(f"step-{number:06d}-*.parquet")
        versions = [int(v) for record in read_trajectories(file) for v in record.trajectory.version_N]
        ages = {number - 1 - version for version in versions}
        assert ages <= {0, 1}, f"step {number}"
        assert row["rollout/staleness/max"] == max(ages)
    wanted = [
        [(place, sample) for place in range(first, first + BATCH) for sample in range(N)]
        for first in range(0, STEPS * BATCH, BATCH)
    ]
    assert [[(place, sample) for place, _, sample in step] for step in drawn(run)] == wanted


def test_responses_are_at_most_one_version_old(tiny: Path, tmp_path: Path) -> None:
    run = run_online(ahead(tiny, tmp_path / "run"), tmp_path, timeout=900)
    check(run)
    rows = read_metrics(run / "metrics.jsonl")
    assert rows[0]["rollout/staleness/max"] == 0.0
    # The second batch is begun together with the first, before there is anything new.
    assert rows[1]["rollout/staleness/max"] == 1.0
    # What the trainer says of the same tokens with weights that are one version newer.
    assert rows[1]["training/rollout_logp_diff_mean"] > 1e-3 > rows[0]["training/rollout_logp_diff_mean"]


def test_a_killed_run_goes_on_with_the_draws_that_are_left(tiny: Path, tmp_path: Path) -> None:
    """Batches that were under way are drawn again, though their responses may be another version's."""
    whole = run_online(ahead(tiny, tmp_path / "whole"), tmp_path, "whole", timeout=900)
    run = resumed(ahead(tiny, tmp_path / "killed"), tmp_path, "killed", after=3, timeout=900)
    check(run)
    assert drawn(run) == drawn(whole)


def test_a_reward_that_breaks_ends_the_run(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(BREAKS.format(note=str(tmp_path / "note")))
    reward = {"function": {"path": f"{tmp_path / 'reward.py'}:score"}}
    run = OnlineRun(ahead(tiny, tmp_path / "run", reward=reward), tmp_path)
    assert run.wait(600) == 1
    assert "this reward is broken for good" in run.text, run.text
    assert "Traceback" not in run.text, run.text
    # What was scored before that is trained on, and no more.
    assert run.trained() == 2


def test_engines_that_keep_dying_end_the_run(tiny: Path, tmp_path: Path) -> None:
    run = OnlineRun(ahead(tiny, tmp_path / "run", steps=100_000), tmp_path)
    try:
        run.wait_for_trained(2)
        deadline = time.monotonic() + 900
        last = None
        while run.process.poll() is None:
            assert time.monotonic() < deadline, run.text
            for pid in run.workers("RolloutWorker"):
                if pid != last:
                    os.kill(pid, signal.SIGKILL)
                    last = pid
            time.sleep(0.2)
        assert run.wait(60) == RETRYABLE
    finally:
        run.end()
    assert "error: rollout engine 0" in run.text and "giving up" in run.text, run.text
    assert "Traceback" not in run.text, run.text


@pytest.mark.parametrize("kind", ["RolloutWorker", "RewardWorker"])
def test_a_worker_that_dies_is_replaced_while_training_goes_on(tiny: Path, tmp_path: Path, kind: str) -> None:
    run = OnlineRun(ahead(tiny, tmp_path / "run", steps=100_000), tmp_path)
    try:
        run.wait_for_trained(2)
        for _ in range(3):
            (victim,) = run.workers(kind)
            os.kill(victim, signal.SIGKILL)
            run.wait_for_trained(run.trained() + 4)
        assert run.text.count("a new worker replaces it") == 3, run.text
    finally:
        run.end()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {row["rollout/staleness/max"] for row in rows} <= {0.0, 1.0}


def test_a_lost_rank_ends_the_run_although_batches_are_being_made(tiny: Path, tmp_path: Path) -> None:
    run = OnlineRun(ahead(tiny, tmp_path / "run", steps=100_000), tmp_path)
    try:
        run.wait_for_trained(2)
        (rank,) = run.workers("PolicyRank")
        os.kill(rank, signal.SIGKILL)
        assert run.wait(120) == RETRYABLE
    finally:
        run.end()
    assert "error: training rank 0" in run.text, run.text
    assert "Traceback" not in run.text, run.text
    # The others were ended, and nobody takes that for their death.
    assert "a new worker replaces it" not in run.text, run.text
