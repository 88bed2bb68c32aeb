"""Ctrl-C: the run saves a checkpoint, as on SIGTERM, and the user is told how to go on."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import npusim
import pytest

from isotrain.engine.checkpoint.layout import FINISHING, MARKER, resume_hint, steps_in
from isotrain.observe.console import LineConsole
from isotrain.trainers.job import Recorder
from support import command, tiny_recipe, write_recipe

pytestmark = pytest.mark.heavy


def test_the_newest_checkpoint_that_is_complete_is_named(tmp_path: Path) -> None:
    assert resume_hint(tmp_path / "none") == (
        "no checkpoint yet: the same command starts from the first step"
    )
    for step in (10, 200, 300):
        (tmp_path / f"step-{step:08d}").mkdir()
    for step in (10, 200):
        (tmp_path / f"step-{step:08d}" / MARKER).touch()
    assert resume_hint(tmp_path) == "the same command resumes after step 200"


def test_only_a_checkpoint_that_is_being_written_is_waited_for_in_words(tmp_path: Path) -> None:
    said = io.StringIO()
    recorder = Recorder(LineConsole(said))
    recorder.interrupted()  # before it is known where the run is
    recorder.checkpoints = tmp_path
    recorder.interrupted()
    assert said.getvalue() == ""
    (tmp_path / ".writing-step-00000400").mkdir()
    recorder.interrupted()
    assert said.getvalue() == FINISHING + "\n"


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_saves_and_says_how_to_go_on(tiny: Path, tmp_path: Path, ranks: int) -> None:
    """Sent to the whole group, as a terminal does."""
    run = started(tiny, tmp_path, ranks)
    os.killpg(run.pid, signal.SIGINT)
    checkpoints = tmp_path / "run" / "checkpoints"
    try:
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130, said
    (step,) = steps_in(checkpoints)
    if ranks == 1:
        assert f"Ctrl-C: saving a checkpoint after step {step}, ending within" in said
        assert "Ctrl-C again ends at once" in said and "SIGTERM" not in said
    assert said.endswith(f"the same command resumes after step {step}\ninterrupted\n"), said
    assert not list(checkpoints.glob(".writing-*"))


def test_a_second_ctrl_c_ends_at_once() -> None:
    program = """
import time
from isotrain.trainers.preemption import preemptible

with preemptible(60, closing=1) as preemption:
    preemption.begin(1)
    print("step", flush=True)
    while not preemption.requested:
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(50)  # a step that takes its time
"""
    run = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    try:
        for line in ("step\n", "asked\n"):
            assert run.stdout.readline() == line
            run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=20)
    finally:
        run.kill()
    assert run.returncode == -signal.SIGINT
    assert said.startswith("Ctrl-C: saving a checkpoint after step 1") and said.endswith(
        "KeyboardInterrupt\n"
    )


def started(tiny: Path, work: Path, ranks: int) -> subprocess.Popen[str]:
    """A run that saves nothing by itself, after its second step."""
    recipe = tiny_recipe(
        tiny, work / "run", "cpu", device={"ranks": ranks}, trainer={"steps": 100_000, "save_every": 100_000}
    )
    metrics = work / "run" / "metrics.jsonl"
    run = subprocess.Popen(
        command("train", str(write_recipe(recipe, work / "recipe.yaml"))),
        env=npusim.environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return run
