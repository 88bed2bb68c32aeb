"""Ctrl-C: a checkpoint that is being written is finished, and the user is told how to go on."""

from __future__ import annotations

import io
import signal
import subprocess
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


def test_ctrl_c_says_how_to_go_on(tiny: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny, tmp_path / "run", "cpu", trainer={"steps": 100_000, "save_every": 1})
    checkpoints = tmp_path / "run" / "checkpoints"
    run = subprocess.Popen(
        command("train", str(write_recipe(recipe, tmp_path / "recipe.yaml"))),
        env=npusim.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while len(steps_in(checkpoints)) < 2:
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130
    assert said.endswith(f"the same command resumes after step {steps_in(checkpoints)[0]}\ninterrupted\n"), (
        said
    )
    assert not list(checkpoints.glob(".writing-*"))
