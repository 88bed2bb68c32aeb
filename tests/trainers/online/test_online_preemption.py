"""SIGTERM to an online run, or to its process group: a checkpoint, and nothing is left within the limit."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
from online_runs import OnlineRun, online_recipe

from isotrain.engine.checkpoint.layout import newest_complete
from isotrain.recipe.schema import Recipe
from isotrain.trainers.preemption import PREEMPTED
from isotrain.weights.file import PREFIX
from support import stable_metrics

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

HANG = 120.0
SHARED = Path("/dev/shm")


def processes_of(run: OnlineRun) -> list[psutil.Process]:
    root = psutil.Process(run.process.pid)
    found = [root, *root.children(recursive=True)]
    assert {"raylet", "gcs_server"} <= {process.name() for process in found}
    return found


def preempt(run: OnlineRun, to: str, work: Path) -> None:
    """Send the signal and wait for the end of everything."""
    processes = processes_of(run)
    shared = held_by(processes)
    assert shared, "the run holds no shared memory: nothing would be checked"
    (os.killpg if to == "group" else os.kill)(run.process.pid, signal.SIGTERM)
    assert run.wait(HANG) == PREEMPTED, run.text
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == [], run.text
    assert not [path for path in shared if path.exists()], run.text
    assert not list(work.glob("isotrain-*"))


def held_by(processes: list[psutil.Process]) -> set[Path]:
    """The shared memory of this run alone: other runs of the machine have theirs."""
    held = set()
    for process in processes:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                held.add(Path(os.readlink(link)))
    return {path for path in held if path.parent == SHARED and path.name.startswith(PREFIX)}


def long_recipe(tiny: Path, output: Path, seconds: float = 90, **sections: dict[str, object]) -> Recipe:
    trainer = {"steps": 2000, "save_every": 0, "preemption_seconds": seconds}
    return online_recipe(tiny, output, trainer=trainer, **sections)


@pytest.mark.parametrize(
    ("to", "staleness"),
    [
        ("group", 0),
        pytest.param("process", 0, marks=pytest.mark.slow),
        pytest.param("group", 1, marks=pytest.mark.slow),
    ],
)
def test_a_preempted_run_resumes_after_its_last_step(
    tiny: Path, tmp_path: Path, to: str, staleness: int
) -> None:
    placement = {"placement": "separate" if staleness else "colocated"}
    recipe = long_recipe(tiny, tmp_path / "run", rollout={"staleness": staleness}, cluster=placement)
    run = OnlineRun(recipe, tmp_path, TMPDIR=str(tmp_path))
    try:
        run.wait_for_trained(3)
        preempt(run, to, tmp_path)
    finally:
        run.end()
    step = newest_complete(tmp_path / "run" / "checkpoints")
    assert step is not None, run.text
    assert f"SIGTERM: saving a checkpoint after step {step}, ending within 90 s" in run.text, run.text
    assert run.text.endswith(f"preempted: the same command resumes after step {step}\n"), run.text
    assert [row["step"] for row in stable_metrics(tmp_path / "run")] == list(range(1, step + 1))
    ends = {"steps": step + 1}
    again = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update=ends)})
    rest = OnlineRun(again, tmp_path, "rest")
    rest.finish()
    assert f"resuming after step {step} of {step + 1}" in rest.text


# Scores of the first steps come at once, later ones never.
SLOW = """
import pathlib, time

def score(response):
    steps = pathlib.Path({metrics!r})
    if steps.exists() and steps.read_bytes().count(b"\\n") >= 3:
        time.sleep(600)
    return len(response) / 100
"""


@pytest.mark.slow
def test_a_step_that_does_not_end_costs_only_its_checkpoint(tiny: Path, tmp_path: Path) -> None:
    function, output = tmp_path / "slow.py", tmp_path / "run"
    function.write_text(SLOW.format(metrics=str(output / "metrics.jsonl")))
    reward = {"function": {"path": f"{function}:score"}, "timeout": 900}
    recipe = long_recipe(tiny, output, 15, reward=reward)
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"save_every": 2})})
    run = OnlineRun(recipe, tmp_path, TMPDIR=str(tmp_path))
    try:
        run.wait_for_trained(3)
        preempt(run, "group", tmp_path)
    finally:
        run.end()
    assert newest_complete(output / "checkpoints") == 2
    assert "SIGTERM: step 4 did not end in time: ending without a new checkpoint" in run.text, run.text
    assert "SIGTERM: not everything" not in run.text, run.text
    assert run.text.endswith("preempted: the same command resumes after step 2\n"), run.text
